"""The gin file that describes the model of converted weights."""

from switch_tf.configs import parts
from switch_tf.configs.gin_syntax import Gin, Macro
from switch_tf.configs.switch_config import SwitchConfig

_MACROS = {"num_experts": "NUM_EXPERTS", "dropout_rate": "DROPOUT_RATE", "expert_dropout_rate": "EXPERT_DROPOUT_RATE"}
_HEADER = ("# Provides: SwitchConfig.  Requires: nothing.  Often overridden: NUM_EXPERTS, DROPOUT_RATE, "
           "EXPERT_DROPOUT_RATE.\n")


def gin_text(config: SwitchConfig) -> str:
    """Returns the model file of a configuration, with the macros of model files."""
    found = Gin()
    found.macros = {macro: getattr(config, name) for name, macro in _MACROS.items()}
    found.bound["", parts.CONFIG] = {name: Macro(_MACROS[name]) if name in _MACROS else value
                                     for name, value in vars(config).items()}
    return _HEADER + found.text()
