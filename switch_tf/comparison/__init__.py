"""Compares dense and sparse models: variants trained in turns, or finished runs."""

from switch_tf.comparison.description import Comparison

__all__ = ["Comparison"]
