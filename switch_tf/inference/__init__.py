"""Inference: compiled programs, answers to texts, export and a server."""

import importlib

from switch_tf.inference.text_model import TextModel, generate

__all__ = ["TextModel", "export", "generate"]


def __getattr__(name: str):
    if name == "export":  # imports TensorFlow
        return importlib.import_module(f"{__name__}.exporting").export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
