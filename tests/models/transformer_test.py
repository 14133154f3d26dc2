"""The encoder's and the decoder's layers: where they are sparse, what they add, what they drop."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig
from switch_tf.layers import Dropout, FeedForward, SwitchFeedForward
from switch_tf.models.stack import Stack, TransformerLayer, switch_feed_forward
from switch_tf.ops import random

SMALL = {"vocab_size": 8, "d_model": 4, "d_ff": 6, "d_kv": 2, "num_heads": 2, "dropout_rate": 0.0}
EVERYTHING = np.ones((1, 1, 1, 3), bool)
REAL = np.ones((1, 3), bool)


def build_stack(is_decoder=False, **overrides):
    stack = Stack(SwitchConfig(**{**SMALL, **overrides}), is_decoder, name="stack")
    stack.build((None, None, overrides.get("d_model", 4)))
    return stack


def silence(stack):
    """With zero output kernels every layer adds nothing."""
    for weight in stack.weights:
        if weight.name in ("out", "wo"):
            weight.assign(np.zeros(weight.shape))
    return stack


# Hand-worked values.


def test_layers_that_add_nothing_leave_the_normalised_embedding():
    stack = silence(build_stack(num_experts=2, num_encoder_layers=2, layer_norm_epsilon=1e-12))
    stack.final_norm.scale.assign([1.0, 2.0, 3.0, 4.0])
    hidden, stats = stack(np.array([[[3.0, 4.0, 0.0, 0.0]]], "float32"), REAL[:, :1], EVERYTHING[..., :1])
    # Root mean square sqrt(25 / 4) = 2.5
    np.testing.assert_allclose(hidden, [[[1.2, 3.2, 0, 0]]], rtol=1e-6)
    assert len(stats) == 1


def test_a_layer_adds_its_feed_forward_to_the_residual():
    layer = TransformerLayer(SwitchConfig(**SMALL, layer_norm_epsilon=1e-12), False, False, name="layer")
    layer.build((None, None, 4))
    layer.attention.out.assign(np.zeros((2, 2, 4)))
    layer.pre_mlp_layer_norm.scale.assign(np.full(4, 10.0))
    layer.mlp.input_kernels[0].assign(np.eye(4, 6))
    layer.mlp.wo.assign(np.eye(6, 4))
    x, bias = np.array([[[2.0, -2.0, 2.0, 2.0]]], "float32"), np.zeros((1, 2, 1, 1), "float32")
    hidden, _ = layer(x, REAL[:, :1], EVERYTHING[..., :1], bias)
    # Root mean square 2: the norm is (1, -1, 1, 1) * 10, and relu of it comes on top of what was there.
    np.testing.assert_allclose(hidden, [[[12.0, -2.0, 12.0, 12.0]]], rtol=1e-6)


@pytest.mark.parametrize("num_layers, step, semantics, expected", [
    (4, 2, "switch_tf", [1, 3]), (6, 3, "switch_tf", [2, 5]), (3, 1, "switch_tf", [0, 1, 2]), (2, 4, "switch_tf", []),
    (4, 0, "switch_tf", []), (6, 4, "mtf", [3]), (6, 4, "hf", [1, 5]), (3, 1, "hf", [0, 1, 2])])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_every_step_th_layer_is_sparse(num_layers, step, semantics, expected, is_decoder):
    name = "decoder" if is_decoder else "encoder"
    stack = build_stack(
        is_decoder, num_experts=2, semantics=semantics, expert_capacity=2 if semantics == "hf" else None,
        **{f"num_{name}_layers": num_layers, f"{name}_sparse_step": step})
    assert [i for i, layer in enumerate(stack.layers) if isinstance(layer.mlp, SwitchFeedForward)] == expected
    assert [i for i, layer in enumerate(stack.layers) if layer.has_feed_forward_experts] == expected
    assert len(stack.layers) == num_layers


# Invariants.


@pytest.mark.parametrize("semantics, is_zero", [("switch_tf", True), ("mtf", True), ("hf", False)])
def test_the_outputs_are_zero_at_padding_but_for_hf(semantics, is_zero):
    stack = build_stack(num_experts=2, semantics=semantics, expert_capacity=2 if semantics == "hf" else None)
    x = np.random.RandomState(0).randn(1, 3, 4).astype("float32")
    hidden, _ = stack(x, np.array([[True, True, False]]), EVERYTHING)
    assert (~hidden.numpy().any(-1)).tolist() == [[False, False, is_zero]]


def test_dropout_takes_a_feature_from_all_positions_of_a_sequence():
    # These layers add nothing, so only the dropouts of the embedding and the last norm remain.
    stack = silence(build_stack(dropout_rate=0.5, num_encoder_layers=1, d_model=64))
    x = np.ones((2, 5, 64), "float32")
    with random.random_seed(0):
        hidden, _ = stack(x, np.ones((2, 5), bool), np.ones((2, 1, 1, 5), bool), training=True)
    is_dropped = hidden.numpy() == 0
    assert (is_dropped == is_dropped[:, :1]).all() and (is_dropped[0] != is_dropped[1]).any()
    # Kept twice with probability 1/2: 3/4 are zero, standard deviation 0.038 over 128, bound 4 of them.
    assert abs(is_dropped[:, 0].mean() - 0.75) < 0.16


def test_every_dropout_has_its_rate_and_its_place():
    stack = build_stack(True, dropout_rate=0.25, expert_dropout_rate=0.5, num_experts=2, num_decoder_layers=2)
    found = {layer.path.removeprefix("stack/"): (layer.rate, layer.broadcast_axis)
             for layer in stack._flatten_layers() if isinstance(layer, Dropout)}
    in_layer = {
        "self_attention/dropout": (0.25, 2), "encoder_decoder_attention/dropout": (0.25, 2),
        "post_attention_dropout": (0.25, 1), "post_cross_attention_dropout": (0.25, 1), "post_mlp_dropout": (0.25, 1)}
    expected = {f"layers_{i}/{name}": value for i in range(2) for name, value in in_layer.items()}
    expected |= {"embedding_dropout": (0.25, 1), "final_dropout": (0.25, 1), "layers_0/mlp/dropout": (0.25, 1)}
    assert found == expected
    assert stack.layers[1].mlp.experts.dropout_rate == 0.5


def test_the_position_bias_is_shared_and_bidirectional_in_encoders_only():
    for is_decoder in (False, True):
        stack = build_stack(is_decoder)
        assert [weight.path for weight in stack.weights if "rel_embedding" in weight.path] == [
            "stack/relpos_bias/rel_embedding"]
        assert stack.relpos_bias.is_bidirectional is not is_decoder


def test_initial_scales_reach_their_kernels():
    stack = build_stack(True, num_experts=8, d_model=64, d_ff=64, d_kv=16, num_heads=4, init_scale=0.25,
                        attention_init_scale=4.0, num_decoder_layers=2)
    for weight in stack.weights:
        # After truncation 0.8796 of sqrt(0.25 / 64) = 1/16; attention 2 / 8, queries 2 / (8 * 4).
        expected = {"wi": 0.8796 / 16, "wo": 0.8796 / 16, "kernel": 0.8796 / 16, "key": 0.25, "value": 0.25,
                    "out": 0.25, "query": 1 / 16}.get(weight.name)
        if expected:
            tolerance = 5 / math.sqrt(2 * math.prod(weight.shape))
            np.testing.assert_allclose(weight.numpy().std(), expected, rtol=tolerance, err_msg=weight.path)


def test_the_configuration_reaches_the_switch_layer_and_its_router():
    values = {
        "activation": "geglu", "group_size": 7, "num_groups_multiple": 2, "jitter_noise": 0.2,
        "train_capacity_factor": 1.5, "eval_capacity_factor": 2.5, "min_expert_capacity": 3,
        "expert_dropout_rate": 0.3, "load_balancing_loss_weight": 0.1, "router_z_loss_weight": 0.2,
        "router_dtype": "bfloat16", "init_scale": 0.5, "semantics": "hf", "expert_capacity": 5, "dispatch": "einsum"}
    routing = {"exploration": "sample", "second_expert_policy": "threshold", "second_expert_threshold": 0.3,
               "second_place_loss_weight": 0.5, "num_selected_experts": 2}
    config = SwitchConfig(**SMALL, **values, **routing, num_experts=3, routing_policy="top_n",
                          decoder_routing_policy="switch")
    sparse = switch_feed_forward(config, False, "float32")
    assert {name: getattr(sparse, name) for name in values} == values
    assert (sparse.num_experts, sparse.d_ff) == (3, 6)
    of_router = {name: values[name] for name in ("jitter_noise", "router_dtype", "init_scale", "semantics")}
    for name, value in {**routing, **of_router, "policy": "top_n"}.items():
        assert getattr(sparse.router, name) == value, name
    decoder_router = switch_feed_forward(config, True, "float32").router
    assert (decoder_router.policy, decoder_router.num_selected_experts) == ("switch", None)
    assert decoder_router.second_place_loss_weight == 0


def test_the_configuration_reaches_the_dense_layer():
    dense = TransformerLayer(SwitchConfig(**{**SMALL, "dropout_rate": 0.2}, activation="geglu", init_scale=0.5), False,
                             False, name="layer").mlp
    assert isinstance(dense, FeedForward)
    assert (dense.d_ff, dense.activation, dense.dropout_rate, dense.init_scale) == (6, "geglu", 0.2, 0.5)


# Dtype policy.


def test_under_bfloat16_the_stack_stays_in_bfloat16_and_the_bias_in_float32():
    seen = []
    stack = Stack(SwitchConfig(**SMALL, num_experts=2), False, dtype="mixed_bfloat16", name="stack")
    stack.build((None, None, 4))
    original = stack.layers[0].attention.call
    stack.layers[0].attention.call = lambda *args, **kwargs: (
        seen.append(kwargs["position_bias"].dtype), original(*args, **kwargs))[1]
    hidden, stats = stack(tf.ones((1, 3, 4), tf.bfloat16), REAL, EVERYTHING)
    assert hidden.dtype == tf.bfloat16
    assert seen == [tf.float32]
    assert all(mean.total.dtype == tf.float32 for layer in stats for mean in layer)
    assert {weight.dtype for weight in stack.weights} == {"float32"}
