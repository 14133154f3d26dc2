"""Writes weights as a checkpoint in switch_tf's format, part by part."""

import math
import pathlib
from typing import Any

import tensorflow as tf

from switch_tf.checkpoints import bundles, continuation, tensors
from switch_tf.checkpoints.bundles import Parts
from switch_tf.checkpoints.folders import DESCRIPTION
from switch_tf.conversion import huggingface_vocabulary, model_gin, portions
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.variables import Piece, in_host_memory, slice_text
from switch_tf.reporting import progress
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing


def write(source: WeightSource, folder: pathlib.Path, vocabulary: bytes | None = None,
          identity: dict[str, Any] | None = None, optimizer: Adafactor | None = None) -> None:
    """Writes weights as a checkpoint, and `model.gin`. The folder appears complete or not at all.

    Args:
        source: Weights.
        folder: Path of a folder that does not exist yet, or is empty.
        vocabulary: bytes or None. A SentencePiece model to write beside the weights, as spiece.model.
        identity: JSON-able. All that determines the files, to go on after a kill. None never goes on.
        optimizer: Adafactor, built for the model, whose slots and step are written too, or None.

    Raises:
        Refusal: a weight cannot be read, or the folder cannot be written.
    """
    groups = portions.groups_of(source)
    files = {"model.gin": model_gin.gin_text(source.config).encode()} | (
        {} if vocabulary is None else {huggingface_vocabulary.FILE: vocabulary})
    slots = {} if optimizer is None else tensors.optimizer_variables(optimizer)
    variables = {_path(name): weight for name, weight in source.weights.items()} | slots
    num_bytes = sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables.values())
    with resumable_folder(folder.resolve(), DESCRIPTION, identity, num_bytes) as work:
        parts, done = Parts(work.folder, work.aside, len(groups) + bool(slots)), len(work.finished)
        with progress.bar(portions.num_bytes(groups), "writing", initial=portions.num_bytes(groups[:done])) as bar:
            for index, group in enumerate(groups[done:], done):
                pieces = [_piece(source, portion, values) for portion, values in portions.read(source, group, bar)]
                with writing(folder):
                    work.finish(parts.write(index, pieces, None if index else bundles.object_graph(variables)))
                del pieces  # before the next ones take memory
        with writing(folder):
            if slots:
                work.finish(parts.write(len(groups), [_whole(path, variable) for path, variable in slots.items()]))
            parts.join()
            step, configuration = 0, continuation.record_of_model(source.config)
            if optimizer is not None:
                step, configuration = int(optimizer.iterations), configuration | {"optimizer": type(optimizer).__name__}
            description = bundles.describe(step, variables, configuration=configuration)
            bundles.complete(work.folder, description, parts.sums(work.finished))
            for name, content in files.items():
                (work.folder / name).write_bytes(content)


def _path(name):
    """Returns the path of a weight in a checkpoint, see `tensors.state_variables`."""
    return f"model/{name}"


def _whole(path, variable):
    return Piece(path, "", in_host_memory(variable.numpy()))


def _piece(source, portion, values):
    weight = source.weights[portion.name]
    index = (portion.rows, *(slice(None) for _ in weight.shape[1:]))
    values = in_host_memory(values.astype(weight.dtype, copy=False))
    return Piece(_path(portion.name), slice_text(weight.shape, index), values)
