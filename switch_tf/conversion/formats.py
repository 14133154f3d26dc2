"""Formats of weights, one record each, for `switch-tf convert` and INITIAL_CHECKPOINT alike. Needs no TensorFlow."""

import contextlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epy

from switch_tf.checkpoints import folders, run_config
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import (
    huggingface_config,
    mesh_tensorflow_file,
    model_gin,
    source_vocabulary,
    t5x_config,
    t5x_file,
)
from switch_tf.storage import places

with epy.lazy_imports():  # which import Keras, and recognising a folder needs none
    from switch_tf.conversion import huggingface, mesh_tensorflow, own, t5x


class Format(NamedTuple):
    """A format of weights.

    Args:
        name: str. Value of `--to`.
        description: str. The folders that hold it, for messages.
        recognises: function(folder) -> bool. The folder may be in a bucket.
        module: Its functions. `open_weights(folder, SwitchConfig or None)` returns a WeightSource.
            `write_weights(WeightSource, new or empty folder, vocabulary, identity, **options)` writes one, and
            `read_optimizer(folder, SwitchTransformer with its weights)` returns the Adafactor, where the format has it.
        options: tuple. Options of `write_weights`. None for a format that is only read.
        find_config: function(folder, of our own format a checkpoint) -> (SwitchConfig, path of the file that states
            it), or None if there is none. The folder may be in a bucket.
        describes_model: bool. Whether a folder holds the model's configuration. `open_weights` needs one otherwise.
        has_optimizer: bool. Whether there is `read_optimizer`. Of a folder in a bucket it needs a copy of all entries.
        is_needed: function(name of an entry) -> bool. Whether a folder in a bucket is copied with it, to be read.
        is_read_in_place: bool. Whether a folder in a bucket is read there, so that nothing is copied.
        resolve: function(folder) -> the folder within it that is read.
    """

    name: str
    description: str
    recognises: Callable[[Any], bool]
    module: Any
    options: tuple[str, ...] | None = None
    find_config: Callable[[Any], tuple[SwitchConfig, Any] | None] = lambda folder: None
    describes_model: bool = True
    has_optimizer: bool = True
    is_needed: Callable[[str], bool] = lambda name: True
    is_read_in_place: bool = False
    resolve: Callable[[Any], Any] = lambda folder: folder

    def at_hand(self, folder: Any, with_optimizer: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager of a folder that the functions take: a copy if it is in a bucket.

        `with_optimizer`: whether `read_optimizer` takes it, too.
        """
        if self.is_read_in_place:
            return contextlib.nullcontext(folder)
        return places.fetched(folder, lambda name: with_optimizer or self.is_needed(name))

    def config_of(self, folder: Any) -> SwitchConfig | None:
        """Returns the configuration that a folder states, before any weight is read; None if it states none."""
        found = self.find_config(folder)
        return None if found is None else found[0]


def _config_of_hugging_face(folder):
    with places.fetched(folder, lambda name: name in ("config.json", "generation_config.json")) as local:
        return huggingface_config.read_config(local), folder / "config.json"


HUGGING_FACE = Format(
    "hugging_face", "Hugging Face's, which holds config.json", run_config.is_hugging_face, huggingface,
    options=("expert_capacity", "dtype"), find_config=_config_of_hugging_face, has_optimizer=False)
T5X = Format(
    "t5x", "T5X's, a checkpoint with the msgpack file checkpoint or Orbax' _METADATA", t5x_file.is_t5x, t5x,
    find_config=t5x_config.find, describes_model=False,
    is_needed=lambda name: not name.startswith("state."))  # the optimizer's
MESH_TENSORFLOW = Format(
    "mesh_tensorflow", "Mesh TensorFlow's, which holds model.ckpt-N.index", mesh_tensorflow_file.is_tensorflow,
    mesh_tensorflow, describes_model=False,
    is_needed=lambda name: mesh_tensorflow_file.is_needed(name) or name == source_vocabulary.FILE)
SWITCH_TF = Format(
    "switch_tf", "a run folder with checkpoints, or one checkpoint",
    lambda folder: (folder / folders.DESCRIPTION).is_file() or (folder / "checkpoints").is_dir(), own,
    options=("optimizer",),
    find_config=lambda checkpoint: (model_gin.recorded(checkpoint), checkpoint / folders.DESCRIPTION),
    is_read_in_place=True,  # a run has other checkpoints, and may be training
    resolve=folders.resolve)

# The first format that recognises a folder is taken.
FORMATS = (HUGGING_FACE, T5X, MESH_TENSORFLOW, SWITCH_TF)
WRITABLE = {one.name: one for one in FORMATS if one.options is not None}


def find(folder: str | pathlib.Path) -> Format | None:
    """Returns the format of a folder, or None if no format recognises it."""
    folder = places.at(folder)
    return next((one for one in FORMATS if one.recognises(folder)), None)


def locate(folder: str | pathlib.Path) -> tuple[Any, Format | None]:
    """Returns the path and the format of weights: of a run folder of T5X its newest checkpoint, else the folder."""
    folder, found = places.at(folder), find(folder)
    if found is None and (newest := t5x_file.newest_in(folder)) is not None:
        print(f"{folder} is a run folder of T5X; reading its newest checkpoint, {newest.name}.", file=sys.stderr)
        return newest, T5X
    return folder, found
