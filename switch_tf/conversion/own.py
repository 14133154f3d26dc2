"""Reads and writes weights in switch_tf's format: a checkpoint without a run."""

import pathlib

from switch_tf import checks
from switch_tf.checkpoints import folders, tensors
from switch_tf.checkpoints.tensors import StoredWeights
from switch_tf.conversion import own_writing, stated_config
from switch_tf.conversion.weight_source import WeightSource, of_model, weights_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal


def from_switch_tf(source: str | pathlib.Path) -> SwitchTransformer:
    """Reads the model of a checkpoint.

    Args:
        source: Path of a checkpoint, or of a run folder for its newest checkpoint.

    Returns:
        SwitchTransformer with float32 weights.

    Raises:
        Refusal: `source` is neither, or its configuration is not recorded.
        BrokenCheckpoint: files are missing or damaged.
    """
    path, config = _checkpoint_and_config(source)
    model = SwitchTransformer(config)
    model.build()
    tensors.restore(path, tensors.state_variables(model))
    return model


def open_switch_tf(source: str | pathlib.Path) -> WeightSource:
    """Opens the weights of a checkpoint without reading them. Arguments and errors as in `from_switch_tf`."""
    path, config = _checkpoint_and_config(source)
    weights, stored = weights_of(config), StoredWeights(path)
    tensors.check_readable(path, {f"model/{name}": weight for name, weight in weights.items()})
    return WeightSource(config, weights, lambda name, rows: stored.read(f"model/{name}", rows))


def read_optimizer(source: str | pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns an Adafactor of the model of a checkpoint, with the checkpoint's slots and step.

    Args:
        source: Path of a checkpoint, or of a run folder for its newest checkpoint.
        model: Its model, built.

    Raises:
        Refusal: The checkpoint holds weights alone, or the state of another optimizer.
        BrokenCheckpoint: files are missing or damaged.
    """
    path = folders.resolve(checks.path("source", source))
    description, name = folders.describe(path), Adafactor.__name__
    if not any(variable.startswith("optimizer/") for variable in description["variables"]):
        raise Refusal(f"{path} holds weights alone; leave out --with_optimizer.")
    if (theirs := description["configuration"].get("optimizer")) != name:
        raise Refusal(f"--with_optimizer reads the state of {name}, and {path} has that of {theirs}; leave it out.")
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    tensors.restore(path, tensors.optimizer_variables(optimizer))
    return optimizer


def _checkpoint_and_config(source):
    path = folders.resolve(checks.path("source", source))
    config = stated_config.recorded(path)
    folders.check_size(config, path)
    return path, config


def to_switch_tf(model: SwitchTransformer, folder: str | pathlib.Path, vocabulary: bytes | None = None,
                 optimizer: Adafactor | None = None) -> None:
    """Writes the weights of a model as a checkpoint, and `model.gin`. The folder appears complete or not at all.

    A run starts from them with the model file `folder/model.gin` and `INITIAL_CHECKPOINT = "folder"`.

    Args:
        model: SwitchTransformer.
        folder: Path of a folder that does not exist yet, or is empty.
        vocabulary: bytes or None. A SentencePiece model to write beside the weights, as spiece.model.
        optimizer: Adafactor, built for the model, or None. Its slots and its step are written too, for a run with
            `Run.initial_variables = "with_optimizer"`.

    Raises:
        Refusal: the folder is not empty, or cannot be written.
    """
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"model must be a SwitchTransformer, not {checks.shown(model)}.")
    if optimizer is not None and not (isinstance(optimizer, Adafactor) and optimizer.built):
        raise Refusal("optimizer must be an Adafactor that is built for the model, or None, not "
                      f"{checks.shown(optimizer)}.")
    folder = checks.path("folder", folder)
    checks.new_folder(folder)
    if not model.built:
        model.build()
    own_writing.write(of_model(model), folder, vocabulary, optimizer=optimizer)
