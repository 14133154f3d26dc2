"""Formats of weights, one record each, for `switch-tf convert` and INITIAL_CHECKPOINT alike. Needs no TensorFlow."""

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
    t5x_config,
    t5x_file,
)
from switch_tf.refusals import Refusal
from switch_tf.storage import places

with epy.lazy_imports():  # which import Keras, and recognising a folder needs none
    from switch_tf.conversion import huggingface, mesh_tensorflow, own, t5x


class Format(NamedTuple):
    """A format of weights.

    Args:
        name: str. Value of `--to`.
        description: str. The folders that hold it, for messages.
        recognises: function(folder) -> bool. Here and below the folder may be in a bucket, where it is read in place.
        module: Its functions. `open_weights(folder, SwitchConfig or None)` returns a WeightSource.
            `write_weights(WeightSource, new or empty folder, vocabulary, identity)` writes one, where the format is
            WRITABLE. `read_optimizer(folder, SwitchTransformer with its weights)` returns the Adafactor, except of
            HUGGING_FACE.
        find_config: function(folder, of our own format a checkpoint) -> (SwitchConfig, path of the file that states
            it), or None if there is none.
        describes_model: bool. Whether a folder holds the model's configuration. `open_weights` needs one otherwise.
        resolve: function(folder) -> the folder within it that is read.
    """

    name: str
    description: str
    recognises: Callable[[Any], bool]
    module: Any
    find_config: Callable[[Any], tuple[SwitchConfig, Any] | None] = lambda folder: None
    describes_model: bool = True
    resolve: Callable[[Any], Any] = lambda folder: folder

    def config_of(self, folder: Any) -> SwitchConfig | None:
        """Returns the configuration that a folder states, before any weight is read; None if it states none."""
        return (self.find_config(folder) or (None,))[0]


HUGGING_FACE = Format(
    "hugging_face", "Hugging Face's, which holds config.json", run_config.is_hugging_face, huggingface,
    find_config=lambda folder: (huggingface_config.read_config(folder), folder / "config.json"))
T5X = Format(
    "t5x", "T5X's, a checkpoint with the msgpack file checkpoint or Orbax' _METADATA", t5x_file.is_t5x, t5x,
    find_config=t5x_config.find, describes_model=False)
MESH_TENSORFLOW = Format(
    "mesh_tensorflow", "Mesh TensorFlow's, which holds model.ckpt-N.index", mesh_tensorflow_file.is_tensorflow,
    mesh_tensorflow, describes_model=False)
SWITCH_TF = Format(
    "switch_tf", "a run folder with checkpoints, or one checkpoint",
    lambda folder: (folder / folders.DESCRIPTION).is_file() or (folder / "checkpoints").is_dir(), own,
    find_config=lambda checkpoint: (model_gin.recorded(checkpoint), checkpoint / folders.DESCRIPTION),
    resolve=folders.resolve)

# The first format that recognises a folder is taken.
FORMATS = (HUGGING_FACE, T5X, MESH_TENSORFLOW, SWITCH_TF)
WRITABLE = {one.name: one for one in (HUGGING_FACE, SWITCH_TF)}


def find(folder: str | pathlib.Path) -> Format | None:
    """Returns the format of a folder, or None if no format recognises it."""
    folder = places.at(folder)
    return next((one for one in FORMATS if one.recognises(folder)), None)


def locate(folder: str | pathlib.Path, argument: str | None = None) -> tuple[Any, Format | None]:
    """Returns the path and the format of weights: of a run folder of T5X its newest checkpoint, else the folder.

    Raises:
        Refusal: No format recognises it, and it was given as an `argument` of this name.
    """
    folder, found = places.at(folder), find(folder)
    if found is None and (newest := t5x_file.newest_in(folder)) is not None:
        print(f"{folder} is a run folder of T5X; reading its newest checkpoint, {newest.name}.", file=sys.stderr)
        return newest, T5X
    if found is None and argument is not None:
        raise Refusal(f"{argument} must be a folder: {', '.join(one.description for one in FORMATS)}; {str(folder)!r} "
                      "is none of these.")
    return folder, found
