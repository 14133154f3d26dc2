"""The rate that utilisation is measured against."""

import time

import tensorflow as tf

_SIZE = 1024


def measured_peak_flops(dtype: str, seconds: float = 0.5) -> float:
    """FLOPs per second of a large matrix product in `dtype` on this machine: the fastest of those run in `seconds`."""
    product = tf.function(lambda a, b: tf.reduce_sum(tf.cast(tf.matmul(a, b), tf.float32)))
    factor = tf.ones((_SIZE, _SIZE), dtype)
    product(factor, factor)
    fastest, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        float(product(factor, factor))
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * _SIZE**3 / fastest
