"""The experts: each sees only its own buffer, and drops out and starts by itself."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import ExpertFeedForward, FeedForward
from switch_tf.ops import random
from tests.layers.switch_layers import built


def make_experts(activation="relu", **kwargs):
    return built(ExpertFeedForward(3, 5, activation, **kwargs), 4)


# Hand-worked values.


def test_each_expert_sees_only_its_own_buffer():
    layer = built(ExpertFeedForward(2, 1), 1, [[[2]], [[3]]], [[[10]], [[100]]])
    outputs = layer(np.array([[[[1.0]]], [[[-1.0]]]], "float32"))
    # expert 0: relu(1 * 2) * 10 = 20; expert 1: relu(-1 * 3) * 100 = 0
    np.testing.assert_array_equal(outputs, [[[[20.0]]], [[[0.0]]]])


def test_geglu_by_hand():
    layer = built(ExpertFeedForward(2, 1, "geglu"), 1, [[[1]], [[2]]], [[[3]], [[5]]], [[[10]], [[100]]])
    # By the tanh formula gelu(1) = 0.841192 and gelu(2) = 1.954598: times 3 and 10, times 5 and 100
    np.testing.assert_allclose(layer(np.ones((2, 1, 1, 1), "float32")).numpy().ravel(), [25.23576, 977.2988], rtol=1e-6)


# Invariants and equivalence.


@pytest.mark.parametrize("activation", ["relu", "geglu", "gelu", "swiglu"])
def test_each_expert_is_a_dense_feed_forward_layer(activation):
    layer, x = make_experts(activation), np.random.RandomState(1).randn(3, 2, 6, 4).astype("float32")
    x[1, :, 3:] = 0
    outputs = layer(x)
    assert not outputs[1, :, 3:].numpy().any()  # empty slots stay zero
    for expert in range(3):
        dense = built(FeedForward(5, activation), 4, *(stacked[expert] for stacked in layer.weights))
        np.testing.assert_allclose(outputs[expert], dense(x[expert]), rtol=1e-5, atol=1e-6)


def test_an_experts_gradient_comes_from_its_own_buffer():
    layer = make_experts()
    with tf.GradientTape() as tape:
        outputs = layer(np.random.RandomState(1).randn(3, 1, 2, 4).astype("float32"))
        total = tf.reduce_sum(outputs[1] ** 2)
    for gradient in tape.gradient(total, [weight.value for weight in layer.weights]):
        assert np.any(gradient[1]) and not np.any(gradient[0]) and not np.any(gradient[2])


def test_dropout_keeps_the_mean_in_bfloat16():
    width, rate = 100, 0.4
    layer = ExpertFeedForward(2, width, dropout_rate=rate, name="experts", dtype="bfloat16")
    built(layer, width, *[np.eye(width)] * 2)
    x = tf.cast(tf.random.stateless_uniform((2, 5, 50, width), (1, 2), 1, 2), "bfloat16")
    with random.random_seed(0):
        outputs = np.asarray(tf.cast(layer(x, training=True), "float64"))
    ratio = (outputs / np.asarray(tf.cast(x, "float64")))[outputs != 0] * (1 - rate)
    # Divided by 0.6 rounded to bfloat16 they would be 0.26 % too small.
    assert abs(ratio.mean() - 1) < 2e-4


def test_experts_groups_and_slots_drop_out_apart_and_in_training_only():
    layer = built(ExpertFeedForward(2, 50, dropout_rate=0.4, name="experts"), 50, *[np.eye(50)] * 2)
    x = np.ones((2, 3, 4, 50), "float32")
    np.testing.assert_array_equal(layer(x), x)
    with random.random_seed(0):
        dropped = layer(x, training=True).numpy() == 0
    assert len({mask.tobytes() for mask in dropped.reshape(-1, 50)}) == 24
