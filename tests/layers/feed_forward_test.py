"""The dense feed-forward layer with each of its activations."""

import json
import math

import numpy as np
import pytest
import scipy.special

from switch_tf.configs.choices import ACTIVATIONS
from switch_tf.layers import FeedForward
from switch_tf.ops import random
from tests.layers.switch_layers import built


def gelu(x):
    """GELU by the tanh formula."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_relu_by_hand():
    layer = built(FeedForward(2), 1, [2, -3], [[10], [100]])
    # 1: relu(2) * 10 + relu(-3) * 100; -1: relu(-2) * 10 + relu(3) * 100
    np.testing.assert_array_equal(layer(np.array([[[1.0], [-1.0]]], "float32")), [[[20.0], [300.0]]])


def test_geglu_by_hand():
    layer = built(FeedForward(1, "geglu"), 1, 1, 3, 10)
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
    is_gated = activation in ("reglu", "geglu", "geglu_exact", "swiglu")
    layer = built(FeedForward(7, activation), 5, wi_0, *[wi_1] * is_gated, wo)
    np.testing.assert_allclose(layer(x.astype("float32")), hidden @ wo, rtol=1e-5, atol=2e-6)


def test_dropout_takes_a_hidden_unit_from_all_positions_in_training_only():
    layer = built(FeedForward(50, dropout_rate=0.5), 1, 1, 2.0 ** -np.arange(50)[:, None])
    x = np.ones((2, 3, 1), "float32")
    with random.random_seed(1):
        outputs = layer(x, training=True).numpy()[..., 0]
    # The sum of powers of two encodes the dropped units: equal at all positions, different between rows.
    assert outputs[0, 0] == outputs[0, 1] == outputs[0, 2] != outputs[1, 0]
    np.testing.assert_allclose(layer(x), np.full((2, 3, 1), 2.0), rtol=1e-6)


def test_numbers_of_numpy_leave_its_config_as_json():
    config = FeedForward(np.int64(3), dropout_rate=np.float32(0.5), init_scale=np.float64(2)).get_config()
    assert (json.dumps([config[name] for name in ("d_ff", "dropout_rate", "init_scale")])) == "[3, 0.5, 2.0]"
