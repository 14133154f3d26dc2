"""Logical axes, layouts, shares of the batch and random numbers that do not depend on them.

Each name is imported when it is first used: a layout is read and checked without TensorFlow.
"""

import importlib

_NAMES = {
    "axes": ("add_weight", "arange", "axes_of", "constrain", "is_partitioned", "use", "with_axes"),
    "dtypes": ("wide_dtype", "widen"),
    "forms": ("can_fuse", "compiled", "fused", "is_fused", "known_values", "queries_at_a_time", "suited_dispatches"),
    "indexing": ("count_into_bins", "look_up", "normalizers_and_targets", "place_of_largest", "write"),
    "layout": ("LOGICAL_AXES", "Layout"),
    "parts": ("check_parts", "current_part", "part_of_batch", "share_of_groups"),
    "products": ("in_blocks", "in_gradient_of", "product"),
    "random": ("batch_positions", "fresh_seed", "layer_seed", "random_seed", "step_seed", "uniform", "uniform_at"),
    "rematerialization": ("rematerialize",),
    "replicas": ("as_ids",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
