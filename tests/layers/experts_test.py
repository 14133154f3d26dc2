"""The experts: each sees only its own buffer, and drops out and starts by itself."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import ExpertFeedForward, FeedForward
from switch_tf.ops import random


def make_experts(num_experts=3, d_ff=5, d_model=4, seed=0, **kwargs):
    layer = ExpertFeedForward(num_experts, d_ff, **kwargs)
    layer.build((num_experts, None, None, d_model))
    rng = np.random.RandomState(seed)
    for weight in layer.weights:
        weight.assign(rng.randn(*weight.shape))
    return layer


# Hand-worked values.


def test_each_expert_sees_only_its_own_buffer():
    layer = ExpertFeedForward(num_experts=2, d_ff=1)
    layer.build((2, 1, 1, 1))
    layer.input_kernels[0].assign([[[2.0]], [[3.0]]])
    layer.wo.assign([[[10.0]], [[100.0]]])
    outputs = layer(np.array([[[[1.0]]], [[[-1.0]]]], "float32"))
    # expert 0: relu(1 * 2) * 10 = 20; expert 1: relu(-1 * 3) * 100 = 0
    np.testing.assert_array_equal(outputs, [[[[20.0]]], [[[0.0]]]])


def test_geglu_by_hand():
    layer = ExpertFeedForward(num_experts=2, d_ff=1, activation="geglu")
    layer.build((2, 1, 1, 1))
    layer.input_kernels[0].assign([[[1.0]], [[2.0]]])
    layer.input_kernels[1].assign([[[3.0]], [[5.0]]])
    layer.wo.assign([[[10.0]], [[100.0]]])
    # By the tanh formula gelu(1) = 0.841192 and gelu(2) = 1.954598: times 3 and 10, times 5 and 100
    np.testing.assert_allclose(layer(np.ones((2, 1, 1, 1), "float32")).numpy().ravel(), [25.23576, 977.2988], rtol=1e-6)


# Invariants and equivalence.


@pytest.mark.parametrize("activation", ["relu", "geglu", "gelu", "swiglu"])
def test_each_expert_is_a_dense_feed_forward_layer(activation):
    layer, x = make_experts(activation=activation), np.random.RandomState(1).randn(3, 2, 6, 4).astype("float32")
    outputs = layer(x)
    for expert in range(3):
        dense = FeedForward(5, activation)
        dense.build((None, None, 4))
        for mine, stacked in zip(dense.weights, layer.weights, strict=True):
            mine.assign(stacked[expert])
        np.testing.assert_allclose(outputs[expert], dense(x[expert]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_empty_slots_stay_zero(activation):
    layer, x = make_experts(activation=activation), np.random.RandomState(1).randn(3, 2, 6, 4).astype("float32")
    x[1, :, 3:] = 0
    assert not layer(x)[1, :, 3:].numpy().any()


def test_an_experts_gradient_comes_from_its_own_buffer():
    layer = make_experts()
    with tf.GradientTape() as tape:
        outputs = layer(np.random.RandomState(1).randn(3, 1, 2, 4).astype("float32"))
        total = tf.reduce_sum(outputs[1] ** 2)
    for gradient in tape.gradient(total, [weight.value for weight in layer.weights]):
        assert np.any(gradient[1]) and not np.any(gradient[0]) and not np.any(gradient[2])


def dropped_units(x_shape, rate=0.5, seed=0, **kwargs):
    """True where a hidden unit was dropped: hidden units are 1, `wo` is the identity."""
    layer = ExpertFeedForward(x_shape[0], x_shape[-1], dropout_rate=rate, name="experts", **kwargs)
    layer.build(x_shape)
    for weight in layer.weights:
        weight.assign(np.tile(np.eye(x_shape[-1]), (x_shape[0], 1, 1)))
    with random.random_seed(seed):
        outputs = layer(np.ones(x_shape, "float32"), training=True).numpy()
    assert set(np.unique(outputs).tolist()) <= {0.0, np.float32(1 / (1 - rate)).item()}
    return outputs == 0


def test_dropout_is_elementwise():
    dropped = dropped_units((2, 3, 4, 50), rate=0.4)
    # 1200 elements: standard deviation sqrt(0.4 * 0.6 / 1200) = 0.014, bound 4 of them
    assert abs(dropped.mean() - 0.4) < 0.057
    # Experts, groups and slots all have masks of their own.
    assert len({row.tobytes() for row in dropped.reshape(-1, 50)}) == 24


def test_dropout_is_the_same_for_the_whole_batch_and_its_parts():
    whole, parts = dropped_units((2, 4, 3, 10)), []
    for index in range(2):
        with partitioning.part_of_batch(2, index):
            parts.append(dropped_units((2, 2, 3, 10)))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_dropout_keeps_the_mean_in_bfloat16():
    width, rate = 100, 0.4
    layer = ExpertFeedForward(2, width, dropout_rate=rate, name="experts", dtype="bfloat16")
    layer.build((2, 5, 50, width))
    for weight in layer.weights:
        weight.assign(np.tile(np.eye(width), (2, 1, 1)))
    x = tf.cast(tf.random.stateless_uniform((2, 5, 50, width), (1, 2), 1, 2), "bfloat16")
    with random.random_seed(0):
        outputs = np.asarray(tf.cast(layer(x, training=True), "float64"))
    ratio = (outputs / np.asarray(tf.cast(x, "float64")))[outputs != 0] * (1 - rate)
    # Divided by 0.6 rounded to bfloat16 they would be 0.26 % too small.
    assert abs(ratio.mean() - 1) < 2e-4


def test_there_is_no_dropout_outside_of_training():
    layer, x = make_experts(dropout_rate=0.9), np.ones((3, 1, 2, 4), "float32")
    np.testing.assert_array_equal(layer(x), make_experts()(x))


# Dtype policy, initial values and serialisation.


@pytest.mark.parametrize("num_experts", [1, 16])
def test_initial_values_do_not_depend_on_the_number_of_experts(num_experts):
    layer = ExpertFeedForward(num_experts, d_ff=400, activation="geglu", init_scale=0.1)
    layer.build((num_experts, None, None, 100))
    assert [weight.name for weight in layer.weights] == ["wi_0", "wi_1", "wo"]
    for weight in layer.weights:
        # sigma = sqrt(0.1 / fan_in), cut at 2 sigma: standard deviation 0.8796 sigma. Not divided by 0.8796 again.
        sigma, value = math.sqrt(0.1 / (400 if weight.name == "wo" else 100)), weight.numpy()
        np.testing.assert_allclose(value.reshape(num_experts, -1).std(1), 0.8796 * sigma, rtol=0.03)
        assert 1.98 * sigma < np.abs(value).max() <= 2 * sigma + 1e-6
        axes = ("expert", "expert_mlp", "embed") if weight.name == "wo" else ("expert", "embed", "expert_mlp")
        assert weight.logical_axes == axes
        # No two experts are alike.
        assert len({expert.tobytes() for expert in value}) == num_experts


def test_under_bfloat16_weights_are_float32_and_outputs_are_not():
    layer = make_experts(dtype="mixed_bfloat16")
    assert layer(tf.ones((3, 1, 1, 4), tf.bfloat16)).dtype == tf.bfloat16
    assert {weight.dtype for weight in layer.weights} == {"float32"}


def test_its_config_makes_it_again():
    arguments = {"num_experts": 2, "d_ff": 3, "activation": "geglu", "dropout_rate": 0.2, "init_scale": 0.5,
                 "name": "mine"}
    config = ExpertFeedForward(**arguments).get_config()
    again = ExpertFeedForward.from_config(config)
    assert again.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match=r"activation must be one of 'relu', .*, not 'rellu'\. Did you mean"):
        ExpertFeedForward(2, 3, activation="rellu")
