"""Reads and writes weights in switch_tf's format: a checkpoint without a run, and the gin file of its model."""

import dataclasses
import pathlib

from switch_tf import checks
from switch_tf.checkpoints import continuation, folders, sizes, tensors
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_vocabulary
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal

_MACROS = {"num_experts": "NUM_EXPERTS", "dropout_rate": "DROPOUT_RATE", "expert_dropout_rate": "EXPERT_DROPOUT_RATE"}


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
    path = folders.resolve(checks.path("source", source))
    fields = continuation.model_fields(folders.describe(path).get("configuration", {}))
    if not fields:
        raise Refusal(f"{path} does not say what model it is of: a version wrote it that kept no record of that.")
    config = SwitchConfig(**fields)
    sizes.check(config, path)
    model = SwitchTransformer(config)
    model.build()
    tensors.restore(path, tensors.state_variables(model))
    return model


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
    files = {"model.gin": gin_text(model.config).encode()} | (
        {} if vocabulary is None else {huggingface_vocabulary.FILE: vocabulary})
    configuration, step = continuation.record_of_model(model.config), 0
    if optimizer is not None:
        configuration |= {"optimizer": type(optimizer).__name__}
        step = int(optimizer.iterations.numpy())
    tensors.write_weights(folder, tensors.state_variables(model, optimizer), configuration, files, step)


def gin_text(config: SwitchConfig) -> str:
    """Returns the model file of a configuration: values that are not defaults, and the macros of model files."""
    lines = ["# Provides: SwitchConfig.  Requires: nothing.  Often overridden: NUM_EXPERTS, DROPOUT_RATE, "
             "EXPERT_DROPOUT_RATE.", "from __gin__ import dynamic_registration",
             "from switch_tf.configs import switch_config", ""]
    lines += [f"{macro} = {getattr(config, name)!r}" for name, macro in _MACROS.items()]
    lines += ["", "switch_config.SwitchConfig:"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _MACROS:
            lines.append(f"  {field.name} = %{_MACROS[field.name]}")
        elif value != field.default:
            lines.append(f"  {field.name} = {value!r}")
    return "\n".join(lines) + "\n"
