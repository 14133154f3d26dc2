"""Formats of weights, one record each, for `switch-tf convert` and INITIAL_CHECKPOINT alike."""

import contextlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epy

from switch_tf.checkpoints import folders, run_config
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_vocabulary, mesh_tensorflow_file, t5x_arrays
from switch_tf.storage import places

with epy.lazy_imports():  # which import Keras, and recognising a folder needs none
    from switch_tf.conversion import huggingface, mesh_tensorflow, own, own_writing, t5x


DTYPES = ("float32", "bfloat16")  # of the tensors in Hugging Face's format


class Extras(NamedTuple):
    """Values that a format may need beside the model.

    `vocabulary`: a SentencePiece model to write beside the weights, or None.
    `expert_capacity`: slots of each expert for each sequence, for a format without capacity factors, or None.
    `dtype`: "float32" or "bfloat16", for a format that has both.
    `identity`: all that determines the files, with which a killed conversion goes on, or None.
    `optimizer`: Adafactor of the model, for a format that can keep its slots, or None.
    """

    vocabulary: bytes | None = None
    expert_capacity: int | None = None
    dtype: str = "float32"
    identity: dict[str, Any] | None = None
    optimizer: Any = None


class Format(NamedTuple):
    """A format of weights.

    Args:
        name: str. Value of `--to`.
        description: str. The folders that hold it, for messages.
        recognises: function(folder) -> bool. The folder may be in a bucket.
        read: function(folder, SwitchConfig or None) -> SwitchTransformer. Of a folder in a bucket it is given a copy.
        open: function(folder, SwitchConfig or None) -> WeightSource. As `read`, without reading a weight.
        write: function(WeightSource, new or empty folder, Extras), or None for a format that is only read.
        describes_model: bool. Whether a folder holds the model's configuration. `read` needs one otherwise.
        is_needed: function(name of an entry) -> bool. Whether a folder in a bucket is copied with it, to be read.
        is_read_in_place: bool. Whether `read` takes a folder in a bucket itself, so that nothing is copied.
        read_optimizer: function(folder, SwitchTransformer from `read`) -> its Adafactor, or None for a format without
            one. Of a folder in a bucket it needs a copy of all entries.
    """

    name: str
    description: str
    recognises: Callable[[Any], bool]
    read: Callable[[pathlib.Path, SwitchConfig | None], Any]
    open: Callable[[pathlib.Path, SwitchConfig | None], Any]
    write: Callable[[Any, pathlib.Path, Extras], None] | None = None
    describes_model: bool = True
    is_needed: Callable[[str], bool] = lambda name: True
    is_read_in_place: bool = False
    read_optimizer: Callable[[pathlib.Path, Any], Any] | None = None

    def at_hand(self, folder: Any, with_optimizer: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager of a folder that the functions take: a copy if it is in a bucket.

        `with_optimizer`: whether `read_optimizer` takes it, too.
        """
        is_needed = _every if with_optimizer else self.is_needed
        return contextlib.nullcontext(folder) if self.is_read_in_place else places.fetched(folder, is_needed)


def _every(name):
    return True


def _is_switch_tf(folder):
    return (folder / folders.DESCRIPTION).is_file() or (folder / "checkpoints").is_dir()


HUGGING_FACE = Format(
    "hugging_face", "Hugging Face's, which holds config.json", run_config.is_hugging_face,
    lambda folder, config: huggingface.from_hugging_face(folder),
    lambda folder, config: huggingface.open_hugging_face(folder),
    lambda source, folder, extras: huggingface.write(source, folder, extras.expert_capacity, extras.vocabulary,
                                                     extras.dtype, extras.identity))
T5X = Format(
    "t5x", "T5X's, a checkpoint with the msgpack file checkpoint or Orbax' _METADATA", t5x_arrays.is_t5x,
    lambda folder, config: t5x.from_t5x(folder, config), lambda folder, config: t5x.open_t5x(folder, config),
    describes_model=False,
    is_needed=lambda name: not name.startswith("state."),  # the optimizer's
    read_optimizer=lambda folder, model: t5x.read_optimizer(folder, model))
MESH_TENSORFLOW = Format(
    "mesh_tensorflow", "Mesh TensorFlow's, which holds model.ckpt-N.index", mesh_tensorflow_file.is_tensorflow,
    lambda folder, config: mesh_tensorflow.from_mesh_tensorflow(folder, config),
    lambda folder, config: mesh_tensorflow.open_mesh_tensorflow(folder, config), describes_model=False,
    is_needed=lambda name: mesh_tensorflow_file.is_needed(name) or name == huggingface_vocabulary.FILE,
    read_optimizer=lambda folder, model: mesh_tensorflow.read_optimizer(folder, model))
SWITCH_TF = Format(
    "switch_tf", "a run folder with checkpoints, or one checkpoint", _is_switch_tf,
    lambda folder, config: own.from_switch_tf(folder), lambda folder, config: own.open_switch_tf(folder),
    lambda source, folder, extras: own_writing.write(source, folder, extras.vocabulary, extras.identity,
                                                     extras.optimizer),
    is_read_in_place=True,  # a run has other checkpoints, and may be training
    read_optimizer=lambda folder, model: own.read_optimizer(folder, model))

# The first format that recognises a folder is taken.
FORMATS = (HUGGING_FACE, T5X, MESH_TENSORFLOW, SWITCH_TF)
WRITABLE = {one.name: one for one in FORMATS if one.write is not None}


def find(folder: str | pathlib.Path) -> Format | None:
    """Returns the format of a folder, or None if no format recognises it."""
    folder = places.at(folder)
    return next((one for one in FORMATS if one.recognises(folder)), None)


def locate(folder: str | pathlib.Path) -> tuple[Any, Format | None]:
    """Returns the path and the format of weights: of a run folder of T5X its newest checkpoint, else the folder."""
    folder, found = places.at(folder), find(folder)
    if found is None and (newest := t5x_arrays.newest_in(folder)) is not None:
        print(f"{folder} is a run folder of T5X; reading its newest checkpoint, {newest.name}.", file=sys.stderr)
        return newest, T5X
    return folder, found
