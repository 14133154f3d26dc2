"""Dense against sparse: variants trained on the same batches in turns, and what finished runs say of each other."""

from switch_tf.comparison.description import Comparison

__all__ = ["Comparison"]
