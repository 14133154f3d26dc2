"""Compares dense and sparse models: trains variants in turns on the same batches, and reports on finished runs."""

from switch_tf.comparison.description import Comparison

__all__ = ["Comparison"]
