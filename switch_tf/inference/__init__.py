"""A trained model at work: compiled programs, and texts in and out."""

import importlib

_MODULES = {"TextModel": "text_model", "generate": "text_model"}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
