"""T5's relative position bias: the buckets, and one bias for each head and distance."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import RelativePositionBias
from switch_tf.layers.attention import relative_position_bucket


def naive_bias(table, query_length, key_length, is_bidirectional, num_buckets, max_distance):
    bias = np.zeros((1, len(table), query_length, key_length))
    for query in range(query_length):
        for key in range(key_length):
            bucket = relative_position_bucket(key - query, is_bidirectional, num_buckets, max_distance)
            bias[0, :, query, key] = table[:, bucket]
    return bias


# Hand-worked values.


@pytest.mark.parametrize("distance, bucket", [
    (0, 0), (-1, 1), (-7, 7), (-8, 8),
    # From 8 on bucket 8 + floor(8 log(n / 8) / log 16) = 8 + floor(2 log2(n / 8)): one step at 8 * sqrt(2)^i,
    # that is at 11.3, 16, 22.6, 32, 45.3, 64 and 90.5.
    (-11, 8), (-12, 9), (-15, 9), (-16, 10), (-22, 10), (-23, 11), (-31, 11), (-32, 12), (-45, 12), (-46, 13),
    (-63, 13), (-64, 14), (-90, 14), (-91, 15), (-127, 15), (-128, 15), (-600, 15), (-10**6, 15),
    # Keys after the query have the other 16.
    (1, 17), (7, 23), (8, 24), (16, 26), (64, 30), (127, 31), (128, 31), (600, 31),
])
def test_bidirectional_buckets(distance, bucket):
    assert relative_position_bucket(distance, is_bidirectional=True) == bucket


@pytest.mark.parametrize("distance, bucket", [
    (0, 0), (1, 0), (600, 0), (-1, 1), (-15, 15), (-16, 16),
    # 16 + floor(16 log(n / 16) / log 8): 18.2, 20.7, 23.6, ... and 112.4 for the last one
    (-18, 16), (-19, 17), (-20, 17), (-21, 18), (-23, 18), (-24, 19), (-112, 30), (-113, 31), (-127, 31), (-128, 31),
    (-600, 31),
])
def test_causal_buckets(distance, bucket):
    assert relative_position_bucket(distance, is_bidirectional=False) == bucket


def test_a_bias_by_hand():
    layer = RelativePositionBias(num_heads=1, num_buckets=4, max_distance=3, is_bidirectional=True)
    layer.build()
    layer.rel_embedding.assign([[10.0, 11.0, 12.0, 13.0]])
    # 2 buckets a side, exact below 1: distance 0 is bucket 0, keys before are bucket 1, keys after bucket 2 + 1.
    np.testing.assert_array_equal(layer(query_length=3, key_length=3), [[[[10, 13, 13], [11, 10, 13], [11, 11, 10]]]])


# Invariants and equivalence.


def test_buckets_grow_with_distance_and_stay_in_range():
    for is_bidirectional in (True, False):
        before = relative_position_bucket(-np.arange(1000), is_bidirectional)
        assert (np.diff(before) >= 0).all() and before.max() == (15 if is_bidirectional else 31)
        after = relative_position_bucket(np.arange(1000), is_bidirectional)
        assert after.dtype == np.int32 and (np.diff(after) >= 0).all() and after.max() < 32


def test_buckets_follow_their_formula():
    for n in range(1, 700):
        expected = n if n < 16 else min(31, 16 + math.floor(16 * math.log(n / 16) / math.log(8) + 1e-9))
        assert relative_position_bucket(-n, is_bidirectional=False) == expected


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize("query_length, key_length", [(1, 1), (5, 5), (40, 40), (3, 9), (9, 3), (1, 6), (6, 1)])
def test_the_bias_and_its_gradient_are_those_of_a_double_loop(is_bidirectional, query_length, key_length):
    rng = np.random.RandomState(0)
    layer = RelativePositionBias(3, num_buckets=8, max_distance=20, is_bidirectional=is_bidirectional)
    layer.build()
    table = rng.randn(3, 8).astype("float32")
    layer.rel_embedding.assign(table)
    weights = rng.randn(1, 3, query_length, key_length).astype("float32")
    with tf.GradientTape() as tape:
        bias = layer(query_length=query_length, key_length=key_length)
        total = tf.reduce_sum(bias * weights)
    np.testing.assert_array_equal(bias, naive_bias(table, query_length, key_length, is_bidirectional, 8, 20))
    expected = np.zeros((3, 8))
    for query in range(query_length):
        for key in range(key_length):
            expected[:, relative_position_bucket(key - query, is_bidirectional, 8, 20)] += weights[0, :, query, key]
    np.testing.assert_allclose(tape.gradient(total, layer.rel_embedding.value), expected, atol=1e-4)


# Dtype policy and serialisation.


def test_the_bias_is_float32_and_its_table_is_not_rounded():
    layer = RelativePositionBias(1, dtype="mixed_bfloat16")
    layer.build()
    layer.rel_embedding.assign(np.full((1, 32), 1.001))
    bias = layer(query_length=2, key_length=2)
    assert layer.rel_embedding.dtype == "float32" and bias.dtype == tf.float32
    np.testing.assert_array_equal(bias, np.full((1, 1, 2, 2), 1.001, "float32"))


def test_the_table_starts_glorot_uniform():
    layer = RelativePositionBias(num_heads=1000, num_buckets=32)
    layer.build()
    # U(+-sqrt(6 / (1000 + 32))): standard deviation limit / sqrt(3)
    table, limit = layer.rel_embedding.numpy(), math.sqrt(6 / 1032)
    assert limit * 0.99 < np.abs(table).max() <= limit
    np.testing.assert_allclose(table.std(), limit / math.sqrt(3), rtol=0.02)
    assert layer.rel_embedding.logical_axes == ("heads", "relpos_buckets")


def test_its_config_makes_it_again():
    config = RelativePositionBias(3, 8, 20, False, name="mine").get_config()
    again = RelativePositionBias.from_config(config)
    assert again.get_config() == config
    assert (again.num_heads, again.num_buckets, again.max_distance, again.is_bidirectional) == (3, 8, 20, False)


@pytest.mark.parametrize("changes, message", [
    ({"num_heads": 0}, "num_heads must be an integer of at least 1, not 0"),
    ({"num_buckets": 3}, "num_buckets must be an integer of at least 4, not 3"),
    ({"num_buckets": 1, "is_bidirectional": False}, "num_buckets must be an integer of at least 2, not 1"),
    # 8 of 32 buckets are exact in each direction, or 16 in a single direction; the rest are logarithmic.
    ({"max_distance": 8}, "max_distance must be an integer of at least 9, not 8"),
    ({"max_distance": 16, "is_bidirectional": False}, "max_distance must be an integer of at least 17, not 16"),
    ({"is_bidirectional": "decoder"}, "is_bidirectional must be True or False, not 'decoder'"),
])
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(**{"num_heads": 2, **changes})
