"""Reads and writes checkpoints of other software."""

import importlib

_MODULES = {"from_hugging_face": "huggingface", "from_mesh_tensorflow": "mesh_tensorflow", "from_switch_tf": "own",
            "from_t5x": "t5x", "to_hugging_face": "huggingface", "to_switch_tf": "own"}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:  # imports Keras
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
