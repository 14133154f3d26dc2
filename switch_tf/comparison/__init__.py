"""Comparison of dense and sparse models: variants trained in turns on the same batches, and finished runs."""

from switch_tf.comparison.description import Comparison

__all__ = ["Comparison"]
