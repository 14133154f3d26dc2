"""T5's attention: unscaled, masked, with a position bias, softmax in float32."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import MultiHeadAttention
from switch_tf.ops import random


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def make_attention(d_model=6, num_heads=2, d_kv=3, seed=0, **kwargs):
    layer = MultiHeadAttention(num_heads, d_kv, **kwargs)
    layer.build((None, None, d_model))
    rng = np.random.RandomState(seed)
    for weight in layer.weights:
        weight.assign(rng.randn(*weight.shape))
    return layer


def naive_attention(layer, inputs, inputs_kv, mask=None, bias=None):
    """One head at a time, in float64."""
    query, key, value, out = (np.asarray(w, np.float64) for w in (layer.query, layer.key, layer.value, layer.out))
    outputs = np.zeros((*inputs.shape[:2], out.shape[-1]))
    for batch in range(len(inputs)):
        for head in range(query.shape[1]):
            scores = (inputs[batch] @ query[:, head]) @ (inputs_kv[batch] @ key[:, head]).T
            if bias is not None:
                scores = scores + bias[0, head]
            if mask is not None:
                scores = np.where(mask[batch, 0], scores, -1e9)
            outputs[batch] += softmax(scores) @ (inputs_kv[batch] @ value[:, head]) @ out[head]
    return outputs


# Hand-worked values.


def test_scores_are_not_scaled():
    # d_kv = 4 with kernels of ones: query = 4-vector of ones, key the same, score 4 * ln 3 / 4 = ln 3 against 0.
    layer = MultiHeadAttention(num_heads=1, d_kv=4)
    layer.build((None, None, 2))
    layer.query.assign(np.stack([np.ones((1, 4)), np.zeros((1, 4))]))
    layer.key.assign(np.stack([np.full((1, 4), math.log(3) / 4), np.zeros((1, 4))]))
    layer.value.assign(np.stack([np.ones((1, 4)), np.zeros((1, 4))]))
    layer.out.assign(np.full((1, 4, 2), 0.25))
    # Keys (1, 0) and (0, 1): probabilities 3/4 and 1/4, values 1 and 0. Divided by sqrt(4) it would be sqrt(3) : 1.
    outputs = layer(np.array([[[1.0, 0.0], [0.0, 1.0]]], "float32"))
    np.testing.assert_allclose(outputs[0, 0], [0.75, 0.75], rtol=1e-6)
    # The second query is 0: both keys alike.
    np.testing.assert_allclose(outputs[0, 1], [0.5, 0.5], rtol=1e-6)


def test_a_masked_key_does_not_count():
    layer = make_attention()
    x = np.random.RandomState(1).randn(1, 3, 6).astype("float32")
    mask = np.array([[[[True, True, False]]]])
    outputs = layer(x, attention_mask=mask)
    np.testing.assert_allclose(outputs, layer(x, inputs_kv=x[:, :2]), rtol=1e-5)
    changed = x.copy()
    changed[:, 2] = 100.0
    np.testing.assert_array_equal(layer(x, inputs_kv=changed, attention_mask=mask), outputs)


def test_a_query_without_keys_takes_the_mean():
    layer = make_attention()
    x = np.random.RandomState(1).randn(1, 3, 6).astype("float32")
    outputs = layer(x, attention_mask=np.zeros((1, 1, 3, 3), bool)).numpy()
    mean = np.einsum("m,mhd,hdn->n", x[0].mean(0), layer.value.numpy(), layer.out.numpy())
    np.testing.assert_allclose(outputs[0], np.tile(mean, (3, 1)), rtol=1e-4)


def test_attending_scores_queries_and_keys_unrounded_and_mixes_in_the_dtype_of_the_values():
    # Scores 257 and 256, which are one number in bfloat16; values 1 and 0: sigmoid(1).
    query, key = tf.constant([[[[1.0]]]]), tf.constant([[[[257.0]], [[256.0]]]])
    value = tf.constant([[[[1.0]], [[0.0]]]], tf.bfloat16)
    layer = MultiHeadAttention(1, 1)
    layer.out = partitioning.add_weight(layer, "out", (1, 1, 1), ("heads", "kv", "embed"), "ones")
    cached_value = tf.transpose(value, (0, 2, 1, 3))
    for arguments in ((key, value, None, None),
                      (tf.transpose(key, (0, 2, 3, 1)), cached_value, None, None, "bhdk"),
                      (tf.transpose(key, (0, 2, 1, 3)), cached_value, None, None, "bhkd")):
        outputs = layer.mix(query, *arguments)
        assert outputs.dtype == tf.bfloat16
        np.testing.assert_allclose(float(outputs[0, 0, 0]), 1 / (1 + math.exp(-1)), rtol=2**-8)


# Equivalence.


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_it_is_numpys(is_cross, use_mask, use_bias):
    rng, layer = np.random.RandomState(2), make_attention()
    x, inputs_kv = 0.5 * rng.randn(2, 4, 6), 0.5 * rng.randn(2, 5 if is_cross else 4, 6)
    inputs_kv = inputs_kv if is_cross else x
    keys = inputs_kv.shape[1]
    mask = rng.rand(2, 1, 4, keys) < 0.7
    mask[..., 0] = True
    mask, bias = mask if use_mask else None, rng.randn(1, 2, 4, keys) if use_bias else None
    outputs = layer(
        x.astype("float32"), inputs_kv=inputs_kv.astype("float32") if is_cross else None, attention_mask=mask,
        position_bias=None if bias is None else bias.astype("float32"))
    np.testing.assert_allclose(outputs, naive_attention(layer, x, inputs_kv, mask, bias), rtol=1e-4, atol=1e-4)


def test_dropout_is_on_probabilities_with_one_mask_for_all_queries():
    # Zero queries: each of 40 keys has probability 1/40. Value i is 2^-i, so the output encodes the dropped keys.
    layer = MultiHeadAttention(num_heads=1, d_kv=1, dropout_rate=0.5)
    layer.build((None, None, 1))
    layer.query.assign([[[0.0]]])
    layer.value.assign([[[1.0]]])
    layer.out.assign([[[40.0]]])
    inputs_kv = np.tile(2.0 ** -np.arange(40, dtype="float32")[:, None], (2, 1, 1))
    x = np.ones((2, 3, 1), "float32")
    with random.random_seed(0):
        outputs = layer(x, inputs_kv=inputs_kv, training=True).numpy()[..., 0]
    assert outputs[0, 0] == outputs[0, 1] == outputs[0, 2] != outputs[1, 0]
    np.testing.assert_allclose(layer(x, inputs_kv=inputs_kv), np.full((2, 3, 1), 2.0), rtol=1e-5)


# Dtype policy, initial values and serialisation.


def test_under_bfloat16_scores_and_softmax_are_float32():
    layer = MultiHeadAttention(num_heads=1, d_kv=2, dtype="mixed_bfloat16")
    layer.build((None, None, 2))
    layer.query.assign([[[256.0, 1.0]], [[0, 0]]])
    layer.key.assign([[[1.0, 1.0]], [[1.0, 0.0]]])
    layer.value.assign([[[1.0, 0.0]], [[0.0, 0.0]]])
    layer.out.assign([[[1.0, 0.0], [0.0, 0.0]]])
    # Query (256, 1), keys (1, 1) and (1, 0): scores 257 and 256, which are one number in bfloat16.
    outputs = layer(tf.constant([[[1.0, 0.0], [0.0, 1.0]]], tf.bfloat16))
    assert outputs.dtype == tf.bfloat16
    assert all(weight.dtype == "float32" for weight in layer.weights)
    np.testing.assert_allclose(float(outputs[0, 0, 0]), 1 / (1 + math.exp(-1)), rtol=2**-8)


def test_under_bfloat16_the_position_bias_is_not_rounded():
    layer = MultiHeadAttention(num_heads=1, d_kv=1, dtype="mixed_bfloat16")
    layer.build((None, None, 1))
    layer.query.assign([[[0.0]]])
    layer.value.assign([[[1.0]]])
    layer.out.assign([[[1.0]]])
    # 257 and 256 again
    bias = tf.constant([[[[257.0, 256.0]]]])
    inputs_kv = tf.constant([[[1.0], [0.0]]], tf.bfloat16)
    outputs = layer(tf.ones((1, 1, 1), tf.bfloat16), inputs_kv=inputs_kv, position_bias=bias)
    np.testing.assert_allclose(float(outputs[0, 0, 0]), 1 / (1 + math.exp(-1)), rtol=2**-8)


@pytest.mark.parametrize("init_scale", [1.0, 0.1])
def test_initial_values(init_scale):
    layer = MultiHeadAttention(num_heads=16, d_kv=25, init_scale=init_scale)
    layer.build((None, None, 100))
    # The scale of 1 / sqrt(d_kv) is in the query's; the sum of `out` runs over heads and d_kv.
    expected = {"query": (100 * 25) ** -0.5, "key": 100**-0.5, "value": 100**-0.5, "out": (16 * 25) ** -0.5}
    assert [weight.name for weight in layer.weights] == list(expected)
    for weight in layer.weights:
        np.testing.assert_allclose(weight.numpy().std(), init_scale**0.5 * expected[weight.name], rtol=0.02)
        # Not truncated: among 40,000 numbers some are beyond 3.5 sigma.
        assert np.abs(weight.numpy()).max() > 3.5 * weight.numpy().std()
        axes = ("heads", "kv", "embed") if weight.name == "out" else ("embed", "heads", "kv")
        assert weight.logical_axes == axes


def test_its_config_makes_it_again():
    arguments = {"num_heads": 2, "d_kv": 3, "dropout_rate": 0.2, "init_scale": 0.5, "name": "mine"}
    config = MultiHeadAttention(**arguments, dtype="mixed_bfloat16").get_config()
    again = MultiHeadAttention.from_config(config)
    assert again.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert again.dtype_policy.name == "mixed_bfloat16"


@pytest.mark.parametrize("changes, message", [
    ({"num_heads": 0}, "num_heads must be an integer of at least 1, not 0"),
    ({"d_kv": 2.0}, r"d_kv must be an integer of at least 1, not 2\.0"),
    ({"dropout_rate": float("nan")}, r"dropout_rate must be a number in \[0, 1\), not nan"),
    ({"init_scale": 0}, "init_scale must be a number above 0, not 0"),
])
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"num_heads": 2, "d_kv": 3, **changes})
