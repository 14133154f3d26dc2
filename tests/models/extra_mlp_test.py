"""ST-MoE's dense feed-forward sublayer after each layer of experts."""

import math

import numpy as np
import pytest

from switch_tf import SwitchConfig
from switch_tf.models.stack import TransformerLayer

TINY = {"vocab_size": 8, "d_model": 4, "d_ff": 6, "d_kv": 2, "num_heads": 2, "dropout_rate": 0.0, "num_experts": 1,
        "layer_norm_epsilon": 1e-12, "extra_mlp": True}


def one_token(layer, x):
    x, is_real = np.array([[x]], "float32"), np.ones((1, 1), bool)
    bias = np.zeros((1, 2, 1, 1), "float32")
    hidden, router_stats = layer(x, is_real, is_real[:, None, None], bias)
    return hidden.numpy()[0, 0], router_stats


def layer_of_identities(is_sparse):
    """Attention adds nothing; each feed-forward layer adds the relu of its norm; the extra one's norm is times 10."""
    layer = TransformerLayer(SwitchConfig(**TINY), False, is_sparse, name="layer")
    layer.build((None, None, 4))
    for weight in layer.weights:
        if weight.name in ("wi", "wo"):
            weight.assign(np.broadcast_to(np.eye(*weight.shape[-2:]), weight.shape))
    layer.attention.out.assign(np.zeros((2, 2, 4)))
    if is_sparse:
        layer.pre_extra_mlp_layer_norm.scale.assign(np.full(4, 10.0))
    return layer


# Hand-worked values.


def test_it_comes_once_after_the_experts_with_norm_and_residual():
    hidden, router_stats = one_token(layer_of_identities(is_sparse=True), [2, -2, 2, 2])
    # Root mean square 2: the expert adds relu(1, -1, 1, 1), which makes (3, -2, 3, 3). That has the mean square 31/4,
    # so the extra layer adds relu(30, -20, 30, 30) / sqrt(31/4).
    added = 30 / math.sqrt(31 / 4)
    np.testing.assert_allclose(hidden, [3 + added, -2, 3 + added, 3 + added], rtol=1e-6)
    assert len(router_stats) == 1


def test_a_dense_layer_has_none():
    layer = layer_of_identities(is_sparse=False)
    hidden, router_stats = one_token(layer, [2, -2, 2, 2])
    np.testing.assert_allclose(hidden, [3, -2, 3, 3], rtol=1e-6)
    assert router_stats == () and not [weight for weight in layer.weights if "extra" in weight.path]


# The model and its counts.


@pytest.mark.parametrize("is_decoder", [False, True])
def test_every_sparse_layer_of_a_model_has_one(fresh_model, is_decoder):
    model = fresh_model(extra_mlp=True, encoder_sparse_step=2, decoder_sparse_step=1)
    stack = model.decoder if is_decoder else model.encoder
    added = [weight.path.partition("/layers_")[2] for weight in stack.weights if "extra_mlp" in weight.path]
    layers = (0, 1) if is_decoder else (1,)
    assert added == [f"{i}/{name}" for i in layers
                     for name in ("pre_extra_mlp_layer_norm/scale", "extra_mlp/wi", "extra_mlp/wo")]


def test_the_counts_are_those_of_the_feed_forward_layer_without_experts():
    with_extra, without = (
        SwitchConfig(**{**TINY, "num_experts": 3, "extra_mlp": extra_mlp}) for extra_mlp in (True, False))
    # 6 sparse layers of 12: each has one norm and one feed-forward layer more.
    assert with_extra.num_parameters - without.num_parameters == 6 * (4 + 2 * 4 * 6)
    more, fewer = with_extra.flops_by_part(7, 3), without.flops_by_part(7, 3)
    assert more["feed_forward"] == 2 * fewer["feed_forward"] == 2 * (2 * 4 * 6) * 6 * (7 + 3)
    assert {part for part in more if more[part] != fewer[part]} == {"feed_forward"}


def test_without_feed_forward_experts_it_is_refused():
    with pytest.raises(ValueError, match="extra_mlp=True needs feed-forward layers of experts; expert_sublayers="):
        SwitchConfig(**TINY, expert_sublayers="attention")
