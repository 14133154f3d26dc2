"""Writes and reads the configuration of converted weights."""

from typing import Any

from switch_tf.checkpoints import continuation, folders
from switch_tf.configs import parts
from switch_tf.configs.gin_syntax import Gin, Macro
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

_MACROS = {"num_experts": "NUM_EXPERTS", "dropout_rate": "DROPOUT_RATE", "expert_dropout_rate": "EXPERT_DROPOUT_RATE"}
_HEADER = ("# Provides: SwitchConfig.  Requires: nothing.  Often overridden: NUM_EXPERTS, DROPOUT_RATE, "
           "EXPERT_DROPOUT_RATE.\n")


def gin_text(config: SwitchConfig) -> str:
    """Returns the gin file of a model, with the shipped files' macros."""
    gin = Gin()
    gin.macros = {macro: getattr(config, name) for name, macro in _MACROS.items()}
    gin.bound["", parts.CONFIG] = {name: Macro(_MACROS[name]) if name in _MACROS else value
                                   for name, value in vars(config).items()}
    return _HEADER + gin.text()


def recorded(checkpoint: Any) -> SwitchConfig:
    """Returns the configuration in a checkpoint's description."""
    fields = continuation.model_fields(folders.describe(checkpoint)["configuration"])
    if not fields:
        raise Refusal(f"{checkpoint} does not say what model it is of: a version wrote it that kept no record of that.")
    return SwitchConfig(**fields)
