"""Reads and writes checkpoints of other software."""

import importlib

__all__ = ["from_hugging_face", "from_switch_tf", "to_hugging_face", "to_switch_tf"]


def __getattr__(name: str):
    if name in __all__:  # imports Keras
        module = "huggingface" if name.endswith("hugging_face") else "own"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
