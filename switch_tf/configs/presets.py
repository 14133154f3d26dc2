"""Presets: configurations read from `gin/models/`."""

from typing import Any

from switch_tf.configs import gin_syntax, parts, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal


def read(name: str) -> Any:
    """Returns the SwitchConfig that `gin/models/<name>.gin` describes.

    Args:
        name: Name of the preset.

    Raises:
        Refusal: No file has that name. Suggests the nearest one.
    """
    names = shipped_gin.preset_names()
    if name not in names:
        raise Refusal(f"There is no preset {name!r}.{nearest(name, names)} The presets are the files of "
                      "gin/models; `switch-tf inspect --list` names them all.")
    return gin_syntax.read_shipped(f"gin/models/{name}.gin").part(parts.CONFIG).make()
