"""Initial values of weights: distributions, dtypes and logical axes; no two experts alike."""

import math
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import (
    ExpertFeedForward,
    FeedForward,
    LogitsDense,
    MultiHeadAttention,
    RelativePositionBias,
    RMSNorm,
    Router,
    TokenEmbedding,
)


def attention_weights(init_scale):
    """The scale of 1 / sqrt(d_kv) is in the query's; the sum of `out` runs over heads and d_kv."""
    scales = {"query": init_scale / (100 * 25), "key": init_scale / 100, "value": init_scale / 100}
    return {**{name: ("normal", scale**0.5, ("embed", "heads", "kv")) for name, scale in scales.items()},
            "out": ("normal", (init_scale / (16 * 25)) ** 0.5, ("heads", "kv", "embed"))}


def dense_weights(wi, scale, d_model, d_ff, experts=(), mlp="mlp"):
    """sigma = sqrt(scale / fan_in)"""
    return {**dict.fromkeys(wi, ("truncated", (scale / d_model) ** 0.5, (*experts, "embed", mlp))),
            "wo": ("truncated", (scale / d_ff) ** 0.5, (*experts, mlp, "embed"))}


GATED = ("wi_0", "wi_1")


@pytest.mark.parametrize("make, width, expected", [
    *((partial(MultiHeadAttention, 16, 25, init_scale=scale), 100, attention_weights(scale)) for scale in (1.0, 0.1)),
    (partial(TokenEmbedding, 1000, 50), 50, {"embedding": ("normal", 1, ("vocab", "embed"))}),
    (partial(LogitsDense, 1000, init_scale=0.1), 40, {"kernel": ("truncated", 0.05, ("embed", "vocab"))}),
    *((partial(FeedForward, 300, activation, init_scale=0.25), 200, dense_weights(wi, 0.25, 200, 300))
      for activation, wi in (("relu", ["wi"]), ("geglu", GATED))),
    *((partial(ExpertFeedForward, count, 400, "geglu", init_scale=0.1), 100,
       dense_weights(GATED, 0.1, 100, 400, ("expert",), "expert_mlp")) for count in (1, 16)),
    (partial(Router, 64, init_scale=0.4), 1000, {"kernel": ("truncated", 0.02, ("embed", "router_expert"))}),
    # Glorot's: +-sqrt(6 / (1000 + 32))
    (partial(RelativePositionBias, 1000), 1, {
        "rel_embedding": ("uniform", math.sqrt(6 / 1032), ("heads", "relpos_buckets"))}),
    (RMSNorm, 3, {"scale": ("ones", 0, ("embed",))}),
])
def test_initial_values(make, width, expected):
    layer = make(dtype="mixed_bfloat16")
    layer.build((None,) * (2 + isinstance(layer, ExpertFeedForward)) + (width,))
    assert [weight.name for weight in layer.weights] == list(expected)
    for weight in layer.weights:
        kind, size, axes = expected[weight.name]
        value, largest = weight.numpy(), np.abs(weight.numpy()).max()
        assert (weight.dtype, weight.logical_axes) == ("float32", axes)
        # Whatever the number of experts.
        rows = value.reshape(getattr(layer, "num_experts", 1) if "expert" in axes else 1, -1)
        assert len({row.tobytes() for row in rows}) == len(rows)
        if kind == "ones":
            np.testing.assert_array_equal(value, np.ones(width))
        elif kind == "normal":
            np.testing.assert_allclose(rows.std(1), size, rtol=0.02)
            assert largest > 3.5 * size  # not truncated: among 40,000 numbers some are beyond 3.5 sigma
        elif kind == "truncated":  # at 2 sigma: standard deviation 0.8796 sigma, not divided by 0.8796 again
            np.testing.assert_allclose(rows.std(1), 0.8796 * size, rtol=0.02)
            assert 1.98 * size < largest <= 2 * size + 1e-6
        else:
            np.testing.assert_allclose(rows.std(1), size / math.sqrt(3), rtol=0.02)
            assert 0.99 * size < largest <= size


def test_under_bfloat16_outputs_of_feed_forward_layers_are_bfloat16():
    for make, num_experts in ((FeedForward, ()), (ExpertFeedForward, (2,))):
        layer = make(*num_experts, 3, dtype="mixed_bfloat16")
        assert layer(tf.ones((*num_experts, 1, 1, 4), tf.bfloat16)).dtype == tf.bfloat16
