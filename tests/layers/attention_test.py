"""T5's attention: unscaled, masked, with a position bias, softmax in float32."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import MultiHeadAttention
from switch_tf.ops import random
from tests.layers.switch_layers import built


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def make_attention():
    return built(MultiHeadAttention(2, 3), 6)


def one_head(query, key, value, out, **kwargs):
    """A layer with these kernels [d_model, d_kv], and the output's [d_kv, d_model]."""
    d_model, d_kv = np.shape(value)
    kernels = (np.broadcast_to(kernel, (d_model, d_kv))[:, None] for kernel in (query, key, value))
    return built(MultiHeadAttention(1, d_kv, **kwargs), d_model, *kernels, out)


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
    first = np.array([[1] * 4, [0] * 4])
    layer = one_head(first, first * math.log(3) / 4, first, 0.25)
    # Keys (1, 0) and (0, 1): probabilities 3/4 and 1/4, values 1 and 0. Divided by sqrt(4) it would be sqrt(3) : 1.
    # The second query is 0: both keys alike.
    np.testing.assert_allclose(layer(np.eye(2, dtype="float32")[None]), [[[0.75] * 2, [0.5] * 2]], rtol=1e-6)


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
    layer = one_head(0, 1, [[1]], 40, dropout_rate=0.5)
    inputs_kv = np.tile(2.0 ** -np.arange(40, dtype="float32")[:, None], (2, 1, 1))
    x = np.ones((2, 3, 1), "float32")
    with random.random_seed(0):
        outputs = layer(x, inputs_kv=inputs_kv, training=True).numpy()[..., 0]
    assert outputs[0, 0] == outputs[0, 1] == outputs[0, 2] != outputs[1, 0]
    np.testing.assert_allclose(layer(x, inputs_kv=inputs_kv), np.full((2, 3, 1), 2.0), rtol=1e-5)


# Dtype policy.


def test_under_bfloat16_scores_and_softmax_are_float32():
    first = [[1, 0], [0, 0]]
    layer = one_head([[256, 1], [0, 0]], [[1, 1], [1, 0]], first, first, dtype="mixed_bfloat16")
    # Query (256, 1), keys (1, 1) and (1, 0): scores 257 and 256, which are one number in bfloat16.
    outputs = layer(tf.eye(2, dtype=tf.bfloat16)[None])
    assert outputs.dtype == tf.bfloat16
    np.testing.assert_allclose(float(outputs[0, 0, 0]), 1 / (1 + math.exp(-1)), rtol=2**-8)


def test_under_bfloat16_the_position_bias_is_not_rounded():
    layer = one_head(0, 1, [[1]], 1, dtype="mixed_bfloat16")
    # 257 and 256 again
    bias = tf.constant([[[[257.0, 256.0]]]])
    inputs_kv = tf.constant([[[1.0], [0.0]]], tf.bfloat16)
    outputs = layer(tf.ones((1, 1, 1), tf.bfloat16), inputs_kv=inputs_kv, position_bias=bias)
    np.testing.assert_allclose(float(outputs[0, 0, 0]), 1 / (1 + math.exp(-1)), rtol=2**-8)
