"""Checkpoints of other software, in and out."""

from switch_tf.conversion.huggingface import from_hugging_face, to_hugging_face

__all__ = ["from_hugging_face", "to_hugging_face"]
