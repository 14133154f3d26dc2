"""Inference: compiled programs, answers to texts, export and a server."""

from switch_tf.inference.exporting import export
from switch_tf.inference.text_model import TextModel, generate

__all__ = ["TextModel", "export", "generate"]
