"""T5's relative position bias: the buckets, and one bias for each head and distance."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import RelativePositionBias
from switch_tf.layers.attention import relative_position_bucket
from tests.layers.switch_layers import built


def test_causal_buckets():
    # From 16 on bucket 16 + floor(16 log(n / 16) / log 8): one step at 16 * 8^(k/16), where n^16 = 16^16 * 8^k, that is
    # at 18.2, 20.7, 23.6, ... and 112.4 for the last one.
    for n in (*range(1, 700), 10**6):
        expected = n if n < 16 else 16 + sum(n**16 >= 16**16 * 8**k for k in range(1, 16))
        buckets = relative_position_bucket(np.array([-n, n, 0]), is_bidirectional=False)
        assert buckets.dtype == np.int32 and buckets.tolist() == [expected, 0, 0]


def test_bidirectional_buckets():
    # From 8 on bucket 8 + floor(8 log(n / 8) / log 16) = 8 + floor(2 log2(n / 8)): one step at 8 * sqrt(2)^k, where
    # n^2 = 64 * 2^k, that is at 11.3, 16, 22.6, 32, 45.3, 64 and 90.5. Keys after the query have the other 16.
    for n in (*range(1, 700), 10**6):
        expected = n if n < 8 else 8 + sum(n**2 >= 64 * 2**k for k in range(1, 8))
        buckets = relative_position_bucket(np.array([-n, n, 0]), is_bidirectional=True)
        assert buckets.dtype == np.int32 and buckets.tolist() == [expected, 16 + expected, 0]


def test_a_bias_by_hand():
    layer = built(RelativePositionBias(1, 4, 3, True), None, [10, 11, 12, 13])
    # 2 buckets a side, exact below 1: distance 0 is bucket 0, keys before are bucket 1, keys after bucket 2 + 1.
    np.testing.assert_array_equal(layer(query_length=3, key_length=3), [[[[10, 13, 13], [11, 10, 13], [11, 11, 10]]]])


# Invariants and equivalence.


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize("query_length, key_length", [(1, 1), (5, 5), (40, 40), (3, 9), (9, 3), (1, 6), (6, 1)])
def test_the_bias_and_its_gradient_are_those_of_a_double_loop(is_bidirectional, query_length, key_length):
    rng = np.random.RandomState(0)
    layer, table = RelativePositionBias(3, 8, 20, is_bidirectional), rng.randn(3, 8).astype("float32")
    built(layer, None, table)
    weights = rng.randn(1, 3, query_length, key_length).astype("float32")
    with tf.GradientTape() as tape:
        bias = layer(query_length=query_length, key_length=key_length)
        total = tf.reduce_sum(bias * weights)
    expected = np.zeros((3, 8))
    for query, key in np.ndindex(query_length, key_length):
        bucket = relative_position_bucket(key - query, is_bidirectional, 8, 20)
        np.testing.assert_array_equal(bias[0, :, query, key], table[:, bucket])
        expected[:, bucket] += weights[0, :, query, key]
    assert bias.shape == weights.shape
    np.testing.assert_allclose(tape.gradient(total, layer.rel_embedding.value), expected, atol=1e-4)


# Dtype policy.


def test_the_bias_is_float32_and_its_table_is_not_rounded():
    bias = built(RelativePositionBias(1, dtype="mixed_bfloat16"), None, 1.001)(query_length=2, key_length=2)
    assert bias.dtype == tf.float32
    np.testing.assert_array_equal(bias, np.full((1, 1, 2, 2), 1.001, "float32"))
