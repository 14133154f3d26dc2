"""The configuration that a folder of weights states, before any weight is read. Needs no TensorFlow."""

from typing import Any

from switch_tf.checkpoints import continuation, folders
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, huggingface_folder, t5x_config
from switch_tf.conversion.formats import Format
from switch_tf.refusals import Refusal
from switch_tf.storage import places

_OF_HUGGING_FACE = ("config.json", "generation_config.json")


def recorded(checkpoint: Any) -> SwitchConfig:
    """Returns the configuration in the description of a checkpoint.

    Raises:
        Refusal: The checkpoint is damaged, or does not describe its model.
    """
    fields = continuation.model_fields(folders.describe(checkpoint)["configuration"])
    if not fields:
        raise Refusal(f"{checkpoint} does not say what model it is of: a version wrote it that kept no record of that.")
    return SwitchConfig(**fields)


def find(source: Any, source_format: Format) -> SwitchConfig | None:
    """Returns the configuration of a folder of weights, which may be in a bucket; None if it states none.

    Args:
        source: Path of the folder, of our own format that of a checkpoint.
        source_format: Its Format.

    Raises:
        Refusal: The folder is damaged, or of a model that switch_tf cannot represent.
    """
    if source_format is formats.SWITCH_TF:
        return recorded(source)
    if source_format is formats.HUGGING_FACE:
        with places.fetched(source, lambda name: name in _OF_HUGGING_FACE) as local:
            return huggingface_folder.read_config(local)
    if source_format is formats.T5X and (found := t5x_config.find(source)) is not None:
        return found[0]
    return None
