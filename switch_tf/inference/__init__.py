"""Inference: compiled programs, answers to texts, export and a server."""

from etils import epy

from switch_tf.inference.text_model import TextModel, generate

with epy.lazy_api_imports(globals()):  # imports TensorFlow
    from switch_tf.inference.exporting import export

__all__ = ["TextModel", "export", "generate"]
