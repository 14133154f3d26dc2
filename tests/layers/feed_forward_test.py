"""The dense feed-forward layer with each of its activations."""

import json
import math

import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from switch_tf.configs.choices import ACTIVATIONS
from switch_tf.layers import FeedForward
from switch_tf.ops import random


def gelu(x):
    """GELU by the tanh formula."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_relu_by_hand():
    layer = FeedForward(d_ff=2)
    layer.build((None, None, 1))
    layer.input_kernels[0].assign([[2.0, -3.0]])
    layer.wo.assign([[10.0], [100.0]])
    # 1: relu(2) * 10 + relu(-3) * 100; -1: relu(-2) * 10 + relu(3) * 100
    np.testing.assert_array_equal(layer(np.array([[[1.0], [-1.0]]], "float32")), [[[20.0], [300.0]]])


def test_geglu_by_hand():
    layer = FeedForward(d_ff=1, activation="geglu")
    layer.build((None, None, 1))
    layer.input_kernels[0].assign([[1.0]])
    layer.input_kernels[1].assign([[3.0]])
    layer.wo.assign([[10.0]])
    # gelu(1) * 3 * 10; gelu(1) is 0.841192 by the tanh formula and would be 0.841345 by the error function.
    np.testing.assert_allclose(layer(np.ones((1, 1, 1), "float32")), [[[30 * 0.841192]]], rtol=1e-6)


def erf_gelu(x):
    return 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_are_numpys(activation):
    rng = np.random.RandomState(0)
    x, wi_0, wi_1 = rng.randn(2, 3, 5), rng.randn(5, 7), rng.randn(5, 7)
    wo = rng.randn(7, 5)
    first, second = x @ wi_0, x @ wi_1
    hidden = {"relu": np.maximum(first, 0), "gelu": erf_gelu(first), "gelu_tanh": gelu(first), "silu": silu(first),
              "reglu": np.maximum(first, 0) * second, "geglu": gelu(first) * second,
              "geglu_exact": erf_gelu(first) * second, "swiglu": silu(first) * second}[activation]
    layer = FeedForward(7, activation)
    layer.build(x.shape)
    for kernel, value in zip(layer.input_kernels, (wi_0, wi_1), strict=False):
        kernel.assign(value)
    layer.wo.assign(wo)
    np.testing.assert_allclose(layer(x.astype("float32")), hidden @ wo, rtol=1e-5, atol=2e-6)


def test_dropout_takes_a_hidden_unit_from_all_positions_in_training_only():
    layer = FeedForward(d_ff=50, dropout_rate=0.5)
    layer.build((None, None, 1))
    layer.input_kernels[0].assign(np.ones((1, 50)))
    layer.wo.assign(2.0 ** -np.arange(50)[:, None])
    x = np.ones((2, 3, 1), "float32")
    with random.random_seed(1):
        outputs = layer(x, training=True).numpy()[..., 0]
    # The sum of powers of two encodes the dropped units: equal at all positions, different between rows.
    assert outputs[0, 0] == outputs[0, 1] == outputs[0, 2] != outputs[1, 0]
    np.testing.assert_allclose(layer(x), np.full((2, 3, 1), 2.0), rtol=1e-6)


@pytest.mark.parametrize("activation, names", [("relu", ["wi", "wo"]), ("geglu", ["wi_0", "wi_1", "wo"])])
def test_weights(activation, names):
    layer = FeedForward(300, activation, init_scale=0.25, dtype="mixed_bfloat16")
    layer.build((None, None, 200))
    assert [weight.name for weight in layer.weights] == names
    for weight in layer.weights:
        is_output = weight.name == "wo"
        assert weight.dtype == "float32"
        assert weight.logical_axes == (("mlp", "embed") if is_output else ("embed", "mlp"))
        # sigma = sqrt(0.25 / fan_in), cut at 2 sigma: standard deviation 0.8796 sigma
        sigma, value = math.sqrt(0.25 / (300 if is_output else 200)), weight.numpy()
        np.testing.assert_allclose(value.std(), 0.8796 * sigma, rtol=0.02)
        assert np.abs(value).max() <= 2 * sigma + 1e-6
    assert layer(tf.ones((1, 1, 200), tf.bfloat16)).dtype == tf.bfloat16


def test_its_config_makes_it_again():
    arguments = {"d_ff": 3, "activation": "geglu", "dropout_rate": 0.2, "init_scale": 0.5, "name": "mine"}
    config = FeedForward(**arguments).get_config()
    again = FeedForward.from_config(config)
    assert again.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match=r"activation must be one of 'relu', .*, not 'gegluu'\. Did you mean 'geglu'"):
        FeedForward(3, activation="gegluu")


@pytest.mark.parametrize("changes, message", [
    ({"d_ff": 0}, "d_ff must be an integer of at least 1, not 0"),
    ({"dropout_rate": 1.5}, r"dropout_rate must be a number in \[0, 1\), not 1\.5"),
    ({"init_scale": -1.0}, r"init_scale must be a number above 0, not -1\.0"),
])
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FeedForward(**{"d_ff": 3, **changes})


def test_numbers_of_numpy_leave_its_config_as_json():
    config = FeedForward(np.int64(3), dropout_rate=np.float32(0.5), init_scale=np.float64(2)).get_config()
    assert (json.dumps([config[name] for name in ("d_ff", "dropout_rate", "init_scale")])) == "[3, 0.5, 2.0]"
