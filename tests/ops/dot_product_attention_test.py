"""Attention with a gradient of its own, against autodiff of the plain formula in float64."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.ops import dot_product_attention as module
from switch_tf.ops import forms

BATCH, QUERIES, KEYS, HEADS, D_KV = 3, 10, 7, 2, 4
NAMES = ("mixed", "query", "key", "value", "position_bias")


class Weight:
    path = "encoder/layers_0/attention/out"


def draw(dtype, seed=0):
    """Query, key, value, a position bias and the gradient from above, of values that bfloat16 has."""
    rng = np.random.RandomState(seed)
    shapes = ((BATCH, QUERIES, HEADS, D_KV), (BATCH, KEYS, HEADS, D_KV), (BATCH, KEYS, HEADS, D_KV),
              (1, HEADS, QUERIES, KEYS), (BATCH, QUERIES, HEADS, D_KV))
    dtypes = (dtype, dtype, dtype, "float64" if dtype == "float64" else "float32", dtype)
    return [tf.cast(tf.cast(rng.randn(*shape), "bfloat16"), kind) for shape, kind in zip(shapes, dtypes, strict=True)]


def mask_of(kind):
    rng = np.random.RandomState(7)
    if kind == "keys":
        return tf.constant(np.arange(KEYS) < np.array([[[[KEYS]]], [[[3]]], [[[1]]]]))
    if kind == "pairs":
        return tf.constant(rng.rand(BATCH, 1, QUERIES, KEYS) < 0.5)
    if kind == "a query sees nothing":
        return tf.constant(np.arange(QUERIES)[:, None] != np.full((BATCH, 1, 1, KEYS), 4))
    return None


def plain(query, key, value, position_bias, mask):
    """In float64, step by step."""
    query, key, value = (tf.cast(x, "float64") for x in (query, key, value))
    scores = tf.einsum("bqhd,bkhd->bhqk", query, key)
    if position_bias is not None:
        scores += tf.cast(position_bias, "float64")
    if mask is not None:
        scores += tf.where(mask, tf.zeros([], "float64"), -1e30)
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), value)


def gradients(function, arguments, upstream):
    """Outputs, and gradients for all arguments that are not None."""
    arguments = [tf.Variable(x) for x in arguments]
    with tf.GradientTape() as tape:
        outputs = function(*arguments)
        total = tf.reduce_sum(tf.cast(outputs, "float64") * tf.cast(upstream, "float64"))
    return [outputs, *tape.gradient(total, arguments)]


def errors(found, expected):
    return [float(np.abs(tf.cast(one, "float64") - tf.cast(other, "float64")).max()
                  / np.abs(tf.cast(other, "float64")).max()) for one, other in zip(found, expected, strict=True)]


MASKS, BIAS_FORMS = ("none", "keys", "pairs", "a query sees nothing"), ("whole", "cut", "none")
BLOCKS = ((None, False), (4, False), (4, True))
# float64 runs all combinations. float32 and bfloat16 run every pair of a mask, a bias form and blocks.
COMBINATIONS = [
    pytest.param(dtype, tolerance, bias_form, mask, *blocks,
                 marks=pytest.mark.exhaustive if dtype == "float32" and mask != "pairs" else ())
    for dtype, tolerance in (("float64", 1e-14), ("float32", 2e-6), ("bfloat16", 2**-6))
    for i, mask in enumerate(MASKS) for j, bias_form in enumerate(BIAS_FORMS) for k, blocks in enumerate(BLOCKS)
    if dtype == "float64" or (i + j + k) % 3 == 0]


@pytest.mark.parametrize("divides_outputs", [False, True])
@pytest.mark.parametrize("dtype, tolerance, bias_form, mask, at_a_time, splits_heads", COMBINATIONS)
def test_values_and_gradients_are_those_of_the_formula(dtype, tolerance, bias_form, mask, at_a_time, splits_heads,
                                                       divides_outputs, monkeypatch):
    monkeypatch.setattr(forms, "queries_at_a_time", lambda: at_a_time)
    monkeypatch.setattr(forms, "divides_outputs", lambda: divides_outputs)
    monkeypatch.setattr(module, "is_split", lambda axis: splits_heads)
    *arguments, upstream = draw(dtype)
    arguments, mask = arguments[:3] if bias_form == "none" else arguments, mask_of(mask)

    def ours(query, key, value, bias=None):
        bias = module.cut(bias) if bias_form == "cut" else bias
        return module.dot_product_attention(query, key, value, mask, bias, Weight)

    def reference(query, key, value, bias=None):
        return plain(query, key, value, bias, mask)

    found, expected = gradients(ours, arguments, upstream), gradients(reference, arguments, upstream)
    assert [x.dtype.name for x in found[:4]] == [dtype] * 4
    assert max(errors(found, expected)) < tolerance, errors(found, expected)
    if bias_form != "none":
        assert found[4].dtype == arguments[3].dtype and found[4].shape == (1, HEADS, QUERIES, KEYS)


@pytest.mark.parametrize("at_a_time, splits_heads, shapes", [
    (None, False, None), (4, True, [(1, 2, 4, 7), (1, 2, 4, 7), (1, 2, 2, 7)]),
    (10, False, None), (8, False, [(1, 1, 10, 7)] * 2)])
def test_a_bias_is_cut_by_heads_or_if_they_are_split_by_queries(at_a_time, splits_heads, shapes, monkeypatch):
    monkeypatch.setattr(forms, "queries_at_a_time", lambda: at_a_time)
    monkeypatch.setattr(module, "is_split", lambda axis: splits_heads)
    bias = draw("float32")[3]
    pieces = module.cut(bias)
    if shapes is None:
        assert pieces is bias
    else:
        assert [tuple(piece.shape) for piece in pieces] == shapes
        np.testing.assert_array_equal(tf.concat(pieces, 2 if splits_heads else 1), bias)


@pytest.mark.parametrize("divides_outputs", [False, True])
def test_in_bfloat16_it_is_about_as_exact_as_autodiff(divides_outputs, monkeypatch):
    """Probabilities in bfloat16 double the error at most. Means over draws, because a CPU may sum in another order."""
    monkeypatch.setattr(forms, "divides_outputs", lambda: divides_outputs)

    def by_autodiff(query, key, value, bias):
        probs = module.probabilities(query, key, None, bias, value.dtype)
        return tf.einsum("bhqk,bkhd->bqhd", probs, value)

    def ours(query, key, value, bias):
        return module.dot_product_attention(query, key, value, None, bias, Weight)

    drawn = []
    for seed in range(8):
        *arguments, upstream = draw("bfloat16", seed)
        expected = gradients(lambda *x: plain(*x, None), arguments, upstream)
        drawn.append([errors(gradients(one, arguments, upstream), expected) for one in (ours, by_autodiff)])
    for name, mine, autodiff in zip(NAMES, *np.mean(drawn, axis=0), strict=True):
        assert mine < 2 * autodiff, name


def test_weights_in_bfloat16_add_up_to_one_when_outputs_are_divided(monkeypatch):
    monkeypatch.setattr(forms, "divides_outputs", lambda: True)
    query, key, *_ = draw("bfloat16")
    mixed = module.dot_product_attention(query, key, tf.ones_like(key), None, None, Weight)
    np.testing.assert_array_equal(tf.cast(mixed, "float32"), 1.0)  # a weighted mean of ones


def test_only_programs_for_a_tpu_take_queries_in_blocks_and_divide_outputs(monkeypatch):
    assert forms.queries_at_a_time() is None and not forms.divides_outputs()
    monkeypatch.setattr(forms, "device_type", lambda: "TPU")
    assert forms.queries_at_a_time() == 256 and forms.divides_outputs()
    monkeypatch.setattr(forms, "is_for_compiler", lambda: True)  # a program over several devices
    for kind, expected in (("CPU", True), ("GPU", False)):
        monkeypatch.setattr(forms, "device_type", lambda kind=kind: kind)
        assert (forms.queries_at_a_time(), forms.divides_outputs()) == (256 if expected else None, expected)
