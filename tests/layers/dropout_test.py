"""Dropout: its mean, its broadcasting, its streams."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Dropout
from switch_tf.ops import random
from tests.layers.switch_layers import in_parts


def drop(layer, x, seed=0):
    with random.random_seed(seed):
        return np.asarray(layer(x, training=True))


def test_elements_are_zero_or_scaled_and_the_mean_stays():
    outputs = drop(Dropout(0.2), np.ones((100, 1000), "float32"))
    # 1 / (1 - 0.2)
    assert set(np.unique(outputs).tolist()) == {0.0, 1.25}
    # 10^5 elements: the share of zeros has standard deviation sqrt(0.2 * 0.8 / 10^5) = 0.00126; 4 of them
    assert abs(np.mean(outputs == 0) - 0.2) < 0.0051
    assert abs(outputs.mean() - 1) < 0.0064


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_low_precision_the_mean_of_outputs_and_of_gradients_stays(dtype):
    x = tf.cast(tf.random.stateless_uniform((100, 1000), (1, 2), 1, 2), dtype)
    with tf.GradientTape() as tape, random.random_seed(0):
        tape.watch(x)
        outputs = Dropout(0.1, dtype=dtype)(x, training=True)
    gradient = tape.gradient(outputs, x, output_gradients=x)
    exact = tf.cast(x, "float64") / 0.9
    for found in (outputs, gradient):
        assert found.dtype == dtype
        kept = found != 0
        ratio = tf.boolean_mask(tf.cast(found, "float64") / exact, kept)
        # Rounding to bfloat16 is wrong by 0.4 % at most and without bias; a factor rounded to it is by -0.16 %.
        assert abs(np.mean(ratio) - 1) < 1e-4
        assert np.max(np.abs(ratio - 1)) < 2 ** -8


@pytest.mark.parametrize("rate, training", [(0.5, False), (0.0, True)])
def test_without_training_or_rate_nothing_happens(rate, training):
    x = tf.ones((2, 3))
    np.testing.assert_array_equal(Dropout(rate)(x, training=training), x)


@pytest.mark.parametrize("axis", [1, 2])
def test_one_mask_serves_all_positions_of_the_broadcast_axis(axis):
    outputs = drop(Dropout(0.5, broadcast_axis=axis), np.ones((3, 20, 20), "float32"))
    first = np.take(outputs, [0], axis)
    np.testing.assert_array_equal(outputs, np.repeat(first, 20, axis))
    # Along the other two axes it differs.
    assert 0.2 < np.mean(first == 0) < 0.8
    assert not np.array_equal(first[0], first[1])


def test_the_gradient_is_the_mask():
    layer, x = Dropout(0.5, name="d"), tf.ones((4, 50))
    with tf.GradientTape() as tape, random.random_seed(0):
        tape.watch(x)
        outputs = layer(x, training=True)
    np.testing.assert_array_equal(tape.gradient(outputs, x), outputs)


def test_streams_differ_by_layer_and_by_step_and_repeat():
    one, two, x = Dropout(0.5, name="one"), Dropout(0.5, name="two"), np.ones((50, 50), "float32")
    base = drop(one, x)
    np.testing.assert_array_equal(drop(one, x), base)
    for other in (drop(two, x), drop(one, x, seed=1), drop(one, x, int(random.step_seed(0, 1)))):
        # Two independent masks agree on half of 2500 elements: standard deviation 0.01, bound 4 of them.
        assert 0.46 < np.mean(other == base) < 0.54


def test_the_mask_is_the_same_for_the_whole_batch_and_its_parts():
    layer, x = Dropout(0.5, broadcast_axis=2, name="d"), np.ones((4, 4, 3, 5), "float32")
    parts = in_parts(4, lambda index: drop(layer, x[index:index + 1]))
    np.testing.assert_array_equal(np.concatenate(parts), drop(layer, x))


def test_bfloat16_stays_bfloat16():
    outputs = drop(Dropout(0.5, dtype="mixed_bfloat16"), tf.ones((4, 4), tf.bfloat16))
    assert outputs.dtype == tf.bfloat16.as_numpy_dtype
    assert set(np.unique(outputs.astype("float32")).tolist()) == {0.0, 2.0}
