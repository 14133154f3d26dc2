"""Logical axes, layouts and shares of the batch.

Names are imported at first use: reading a layout needs no TensorFlow.
"""

import importlib

_NAMES = {
    "axes": ("add_weight", "arange", "axes_of", "check_parts", "constrain", "is_for_compiler", "is_partitioned",
             "part_of_batch", "share_of_groups", "use", "with_axes"),
    "layout": ("LOGICAL_AXES", "Layout"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
