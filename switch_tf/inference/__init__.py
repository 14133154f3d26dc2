"""A trained model at work: compiled programs, and texts in and out."""

from switch_tf.inference.text_model import TextModel, generate

__all__ = ["TextModel", "generate"]
