"""What a router by itself, a layer and a model do with padding under the semantics of others."""

import dataclasses

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer
from switch_tf.layers import Router, SwitchFeedForward

X = np.random.RandomState(0).randn(2, 6, 5).astype("float32")
IS_REAL = np.arange(6) < np.array([[4], [5]])


def route(semantics, **arguments):
    keras.utils.set_random_seed(0)
    return Router(3, semantics=semantics)(X, expert_capacity=2, **arguments)


@pytest.mark.parametrize("semantics", ["t5x", "hf"])
def test_a_router_that_routes_padding_ignores_the_mask(semantics):
    for masked, unmasked in zip(keras.tree.flatten(route(semantics, padding_mask=IS_REAL)),
                                keras.tree.flatten(route(semantics)), strict=True):
        np.testing.assert_array_equal(masked, unmasked)


@pytest.mark.parametrize("semantics", ["switch_tf", "mtf"])
def test_other_routers_do_not(semantics):
    decisions, _ = route(semantics, padding_mask=IS_REAL)
    assert not np.asarray(decisions.is_filled)[~IS_REAL].any()
    assert np.asarray(route(semantics)[0].is_filled)[~IS_REAL].any()


@pytest.mark.parametrize("semantics", ["t5x", "hf"])
def test_what_is_not_there_is_not_routed_whatever_the_semantics(semantics):
    decisions, stats = route(semantics, padding_mask=IS_REAL, is_present=IS_REAL)
    assert not np.asarray(decisions.is_filled)[~IS_REAL].any()
    assert stats.router_z_loss.weight == IS_REAL.sum()


@pytest.mark.parametrize("semantics, num_counted", [("switch_tf", IS_REAL.sum()), ("mtf", IS_REAL.sum()), ("t5x", 30)])
def test_a_layer_completes_groups_with_zeros_which_only_t5x_routes(semantics, num_counted):
    # 2 * 6 tokens in 5 groups of 3. In T5X, with 3 experts, a multiple of 15: 5 rows of 6, or 2 of 15.
    layer = SwitchFeedForward(3, d_ff=4, num_groups_multiple=5, semantics=semantics)
    _, stats = layer.forward(X, padding_mask=IS_REAL)
    assert stats.router_z_loss.weight == num_counted


@pytest.mark.parametrize("semantics, matters", [("switch_tf", False), ("mtf", False), ("t5x", False), ("hf", True)])
def test_what_a_model_is_given_as_padding_matters_where_it_is_routed_unzeroed(shallow_config, semantics, matters):
    # One of two layers is sparse: under "hf" a stack of sparse layers alone would have no losses.
    config = dataclasses.replace(shallow_config, semantics=semantics, num_decoder_layers=0, num_encoder_layers=2,
                                 encoder_sparse_step=2, expert_capacity=3 if semantics == "hf" else None)
    keras.utils.set_random_seed(0)
    model = SwitchTransformer(config)
    tokens = np.random.RandomState(0).randint(3, config.vocab_size, (4, 6)).astype("int32")
    is_real = np.arange(6) < 4
    results = []
    for padding in (0, 7):
        features = {"encoder_input_tokens": np.where(is_real, tokens, padding).astype("int32"),
                    "encoder_segment_ids": np.tile(is_real.astype("int32"), (4, 1))}
        logits, (stats,) = model.forward(features)
        results.append((float(stats.load_balancing_loss.value), float(stats.router_z_loss.value)))
        assert np.isfinite(logits).all()
    assert (abs(np.subtract(*results)) > 1e-4).any() == matters
