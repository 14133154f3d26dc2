"""Reads and writes weights in switch_tf's format, a checkpoint."""

import math
import pathlib
from typing import Any

import tensorflow as tf

from switch_tf import checks
from switch_tf.checkpoints import bundles, continuation, folders, tensors
from switch_tf.checkpoints.bundles import Parts
from switch_tf.checkpoints.tensors import StoredWeights
from switch_tf.conversion import model_gin, source_vocabulary, weight_source
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.variables import Piece, host_tensor, slice_text
from switch_tf.refusals import Refusal
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing


def from_switch_tf(source: str | pathlib.Path) -> SwitchTransformer:
    """Reads the model of a checkpoint, with float32 weights.

    Args:
        source: A checkpoint, or a run folder for its newest one.

    Raises:
        BrokenCheckpoint: Files are missing or damaged.
    """
    return weight_source.read_model(open_weights(source))


def open_weights(source: str | pathlib.Path, config: None = None) -> WeightSource:
    """Opens weights without reading them, see `from_switch_tf`."""
    path = folders.resolve(checks.path("source", source))
    config = model_gin.recorded(path)
    folders.check_size(config, path)
    weights, stored = weight_source.weights_of(config), StoredWeights(path)
    tensors.check_readable(path, {f"{folders.MODEL}{name}": weight for name, weight in weights.items()})
    return WeightSource(config, weights, lambda name, rows: stored.read(f"{folders.MODEL}{name}", rows))


def read_optimizer(source: str | pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor in a checkpoint of the built `model`."""
    path = folders.resolve(checks.path("source", source))
    description, name = folders.describe(path), Adafactor.__name__
    if not any(variable.startswith("optimizer/") for variable in description["variables"]):
        raise Refusal(f"{path} holds weights alone; leave out --with_optimizer.")
    if (recorded := description["configuration"].get("optimizer")) != name:
        raise Refusal(f"--with_optimizer reads the state of {name}, and {path} has that of {recorded}; leave it out.")
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    tensors.restore(path, tensors.optimizer_variables(optimizer))
    return optimizer


def to_switch_tf(model: SwitchTransformer, folder: str | pathlib.Path, vocabulary: bytes | None = None,
                 optimizer: Adafactor | None = None) -> None:
    """Writes a model's weights as a checkpoint, and `model.gin`. The folder appears complete or not at all.

    A run starts from the model file `folder/model.gin` and `INITIAL_CHECKPOINT = "folder"`.

    Args:
        folder: New or empty folder.
        vocabulary: SentencePiece model to write as spiece.model.
        optimizer: Built for the model. Its slots and step are also written, for a run with
            `Run.initial_variables = "with_optimizer"`.
    """
    if optimizer is not None and not (isinstance(optimizer, Adafactor) and optimizer.built):
        raise Refusal("optimizer must be an Adafactor that is built for the model, or None, not "
                      f"{checks.shown(optimizer)}.")
    folder = checks.path("folder", folder)
    checks.new_folder(folder)
    write_weights(weight_source.model_weights(model), folder, vocabulary, optimizer=optimizer)


def write_weights(source: WeightSource, folder: pathlib.Path, vocabulary: bytes | None = None,
                  identity: dict[str, Any] | None = None, optimizer: Adafactor | None = None) -> None:
    """Writes weights as `to_switch_tf` does, a portion at a time.

    Args:
        identity: JSON-able, all that determines the files. After a kill the same identity continues. None starts anew.
    """
    groups = weight_source.groups_of(source)
    slots = {} if optimizer is None else tensors.optimizer_variables(optimizer)
    variables = {f"{folders.MODEL}{name}": weight for name, weight in source.weights.items()} | slots
    num_bytes = sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables.values())
    with resumable_folder(folder.resolve(), folders.DESCRIPTION, identity, num_bytes) as work:
        parts = Parts(work.folder, work.aside, len(groups) + bool(slots))
        for index, portions in weight_source.read_groups(source, groups, "writing", len(work.finished)):
            pieces = []
            for name, rows, values in portions:
                weight = source.weights[name]
                place = slice_text(weight.shape, (rows, *(slice(None) for _ in weight.shape[1:])))
                values = host_tensor(values.astype(weight.dtype, copy=False))
                pieces.append(Piece(f"{folders.MODEL}{name}", place, values))
            with writing(folder):
                work.finish(parts.write(index, pieces, None if index else bundles.object_graph(variables)))
            del pieces, values  # the next portions need the memory
        with writing(folder):
            step, configuration = 0, continuation.record_of(source.config)
            if optimizer is not None:
                step, configuration = int(optimizer.iterations), configuration | {"optimizer": type(optimizer).__name__}
                work.finish(parts.write(len(groups), [
                    Piece(path, "", host_tensor(variable.numpy())) for path, variable in slots.items()]))
            sums = parts.join(work.finished)
            description = bundles.describe(step, variables, configuration=configuration)
            bundles.complete(work.folder, description, sums)
            (work.folder / "model.gin").write_bytes(model_gin.gin_text(source.config).encode())
            if vocabulary is not None:
                (work.folder / source_vocabulary.FILE).write_bytes(vocabulary)
