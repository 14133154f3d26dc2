"""The gin file that describes the model of converted weights."""

import dataclasses

from switch_tf.configs.switch_config import SwitchConfig

_MACROS = {"num_experts": "NUM_EXPERTS", "dropout_rate": "DROPOUT_RATE", "expert_dropout_rate": "EXPERT_DROPOUT_RATE"}


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
