"""Presets: configurations read from `gin/models/`, without touching the gin configuration of the caller."""

import importlib.util  # noqa: F401  gin 0.5 uses it without importing it
from typing import Any

import gin
from gin import config as gin_config

from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal


def read(name: str, config_class: type) -> Any:
    """Returns the SwitchConfig that `gin/models/<name>.gin` describes.

    Args:
        name: Name of the preset.
        config_class: SwitchConfig. Its module imports this one, so it is an argument.

    Raises:
        Refusal: No file has that name. Suggests the nearest one.
    """
    names = shipped_gin.preset_names()
    if name not in names:
        raise Refusal(f"There is no preset {name!r}.{nearest(name, names)} The presets are the files of "
                      "gin/models; `switch-tf inspect --list` names them all.")
    # gin keeps its configuration in module globals: this one is parsed between saving and restoring them.
    tables = ("_CONFIG", "_SINGLETONS", "_OPERATIVE_CONFIG", "_IMPORTS")
    saved = {table: getattr(gin_config, table).copy() for table in tables}
    prefixes, is_locked = list(gin_config._LOCATION_PREFIXES), gin_config.config_is_locked()
    try:
        with gin.unlock_config(), gin.config_scope(None):
            gin.clear_config()
            # No other folder: a file there would be included instead, and gin logs an error for each without it.
            gin_config._LOCATION_PREFIXES[:] = [str(shipped_gin.folder())]
            gin.parse_config_file(str(shipped_gin.path(f"gin/models/{name}.gin")))
            return gin.get_configurable(config_class)()
    finally:
        with gin.unlock_config():
            gin.clear_config()
            for table, content in saved.items():
                getattr(gin_config, table).update(content)
        gin_config._LOCATION_PREFIXES[:] = prefixes
        gin_config._set_config_is_locked(is_locked)
