"""Checkpoints of other software, in and out."""

from switch_tf.conversion.huggingface import from_hugging_face, to_hugging_face
from switch_tf.conversion.own import from_switch_tf, to_switch_tf

__all__ = ["from_hugging_face", "from_switch_tf", "to_hugging_face", "to_switch_tf"]
