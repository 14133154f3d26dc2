"""Compares dense and sparse models: variants trained in turns on the same batches, or finished runs."""

from switch_tf.comparison.description import Comparison

__all__ = ["Comparison"]
