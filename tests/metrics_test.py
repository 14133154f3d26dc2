"""Means are sums until they are divided, so they merge exactly."""

import numpy as np
import tensorflow as tf

from switch_tf import metrics
from switch_tf.metrics import Mean, RouterStats


def stats(offset):
    return RouterStats(*(Mean(np.float32(offset + i), np.float32(1 + i)) for i in range(len(RouterStats._fields))))


def test_a_mean_is_its_total_over_its_weight():
    assert Mean(tf.constant(3.0), tf.constant(4.0)).value == 0.75
    np.testing.assert_array_equal(Mean(tf.constant([2.0, 1.0]), tf.constant(4.0)).value, [0.5, 0.25])


def test_merging_is_not_the_mean_of_means():
    # (1 + 9) / (1 + 3) = 2.5, not (1 / 1 + 9 / 3) / 2 = 2
    merged = Mean(1.0, 1.0).merge(Mean(9.0, 3.0))
    assert merged == Mean(10.0, 4.0)
    assert merged.value == 2.5


def test_the_mean_of_nothing_is_0():
    assert Mean(tf.constant(0.0), tf.constant(0.0)).value == 0
    np.testing.assert_array_equal(Mean(tf.zeros(2), tf.constant(0.0)).value, [0, 0])


def test_router_statistics_merge_field_by_field():
    merged = stats(0).merge(stats(10))
    for i, mean in enumerate(merged):
        # (0 + i) + (10 + i) over (1 + i) + (1 + i)
        assert mean == Mean(10 + 2 * i, 2 + 2 * i)


def test_dictionaries_merge_by_name_and_keep_what_only_one_has():
    merged = metrics.merge({"a": Mean(1.0, 1.0), "b": Mean(2.0, 2.0)}, {"c": Mean(4.0, 4.0), "a": Mean(3.0, 1.0)})
    assert merged == {"a": Mean(4.0, 2.0), "b": Mean(2.0, 2.0), "c": Mean(4.0, 4.0)}
    assert list(merged) == ["a", "b", "c"]


def test_on_the_host_means_are_float64():
    # 2^24 + 1 does not fit into float32: sums over steps go on in float64.
    host = metrics.to_host({"tokens": Mean(tf.constant(2.0**24), tf.constant(1.0))})["tokens"]
    assert isinstance(host.total, np.ndarray) and host.total.dtype == host.weight.dtype == np.float64
    assert host.merge(Mean(1.0, 0.0)).total == 2**24 + 1
