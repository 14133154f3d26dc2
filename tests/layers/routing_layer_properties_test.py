"""What must hold for the Switch layer under every policy: zeros, gradients, jitter, inference, and NaN tokens."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.ops import random
from tests.layers.switch_layers import ROUTERS as SHARED
from tests.layers.switch_layers import built, dispatches, kinds_first

NUM_EXPERTS, D_MODEL, D_FF = 4, 5, 6
ROUTERS = {name: options for name, options in SHARED.items() if name != "switch, sampled"}
ROUTERS["top2, threshold"] = {**ROUTERS["top2, threshold"], "second_expert_threshold": 0.51}
WITH_LOGITS = [name for name in ROUTERS if name != "hash"]
# One of each kind: a token's choice, several, in turn by confidence, the experts'.
KINDS = ("switch", "top2, random", "batch_prioritized, 2", "expert_choice")


def make_layer(name, dispatch="index", factor=1.0, exploration="argmax", jitter_noise=0.0, **kwargs):
    """A layer whose outputs are never 0 by chance: GEGLU, random weights."""
    router = Router(NUM_EXPERTS, exploration=exploration, jitter_noise=jitter_noise, name="router", **ROUTERS[name])
    layer = SwitchFeedForward(NUM_EXPERTS, D_FF, "geglu", train_capacity_factor=factor, eval_capacity_factor=factor,
                              min_expert_capacity=1, dispatch=dispatch, router=router, name="layer", **kwargs)
    return built(layer, D_MODEL)


cached_layer = functools.cache(make_layer)


def make_inputs(batch, length, seed=1, share_real=0.8):
    random = np.random.RandomState(seed)
    return (random.randn(batch, length, D_MODEL).astype("float32"), random.rand(batch, length) < share_real,
            random.randint(0, 100, (batch, length)).astype("int32"))


def decide(layer, inputs, is_real, token_ids, capacity, training=False):
    return layer.router(inputs, padding_mask=is_real, expert_capacity=capacity, token_ids=token_ids,
                        training=training)[0]


@pytest.mark.parametrize("name", kinds_first(ROUTERS, KINDS))
def test_padding_and_what_no_expert_took_get_exactly_zero_and_all_else_does_not(name):

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.integers(1, 3), st.sampled_from([1, 2, 8]), st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0.5, 1.0]),
           st.sampled_from(dispatches(name)), st.booleans(), st.integers(0, 2**31 - 1))
    def check(batch, length, factor, share_real, dispatch, training, seed):
        inputs, is_real, token_ids = make_inputs(batch, length, seed, share_real)
        outputs, stats = cached_layer(name, dispatch, factor).forward(
            inputs, padding_mask=is_real, token_ids=token_ids, training=training)
        is_zero = ~np.asarray(outputs).any(-1)
        assert is_zero[~is_real].all()
        assert is_zero[is_real].sum() == stats.fraction_tokens_dropped.total

    check()


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_the_router_learns_from_every_token_that_an_expert_took_and_from_no_other(name):
    layer = make_layer(name)
    inputs, is_real, token_ids = make_inputs(2, 9)
    x = tf.constant(inputs)
    with random.random_seed(1), tf.GradientTape() as tape:
        tape.watch(x)
        decisions = decide(layer, x, is_real, token_ids, 2, training=True)
        # Weights, because normalised gates sum to 1, which has no gradient.
        gate = decisions.gate
        weights = np.random.RandomState(3).randn(*gate.shape).astype("float32")
        total = tf.reduce_sum(gate * weights)
    kernel_gradient, x_gradient = tape.gradient(total, [layer.router.kernel.value, x])
    if name == "expert_choice":
        is_taken = np.array([np.isin(np.arange(9), index) for index in np.asarray(decisions.token_index)])
    else:
        is_taken = (np.asarray(decisions.slot) < 2).any(-1)
    assert is_taken.any() and not is_taken.all()
    np.testing.assert_array_equal(np.abs(x_gradient).max(-1) > 1e-6, is_taken)
    assert np.abs(kernel_gradient).max() > 1e-3


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_the_layers_loss_moves_the_router_and_every_expert_that_has_a_token(name):
    layer = make_layer(name)
    inputs, is_real, token_ids = make_inputs(2, 9)
    with random.random_seed(1), tf.GradientTape() as tape:
        outputs, stats = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids, training=True)
        loss = tf.reduce_sum(outputs**2)
    router, *experts = tape.gradient(loss, [weight.value for weight in (layer.router.kernel, *layer.experts.weights)])
    assert np.abs(router).max() > 0.1
    is_wanted = np.asarray(stats.expert_load.total) > 0
    for gradient in experts:
        assert (np.abs(gradient).max((1, 2)) > 0.1)[is_wanted].all()


def test_the_hash_policy_has_nothing_to_learn_and_its_experts_do():
    layer = make_layer("hash")
    assert layer.router.weights == [] and len(layer.trainable_weights) == 3
    inputs, is_real, token_ids = make_inputs(2, 9)
    with tf.GradientTape() as tape:
        outputs, _ = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids, training=True)
        loss = tf.reduce_sum(outputs**2)
    assert all(np.abs(gradient).max() > 0.1 for gradient in tape.gradient(loss, [w.value for w in layer.weights]))


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_jitter_moves_gates_in_training_only_and_experts_get_the_inputs_as_they_are(name):
    layer = make_layer(name, exploration="input_jitter", jitter_noise=0.3)
    for weight in layer.experts.weights:  # all experts alike: an output is the sum of the gates times one expert's
        weight.assign(np.repeat(weight[:1], NUM_EXPERTS, axis=0))
    inputs, is_real, token_ids = make_inputs(1, 12)
    dense = layer.experts(np.repeat(inputs[None], NUM_EXPERTS, axis=0))[0]
    gates = {}
    for training in (False, True):
        with random.random_seed(2):
            decisions = decide(layer, inputs, is_real, token_ids, 3, training)
            outputs, _ = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids, training=training)
        if name == "expert_choice":
            index, gate = np.asarray(decisions.token_index)[0].ravel(), np.asarray(decisions.gate)[0].ravel()
            sums = np.bincount(index, gate, minlength=13)[None, :12]
        else:
            sums = np.asarray(decisions.gate).sum(-1)
        np.testing.assert_allclose(outputs, sums[..., None] * dense, rtol=1e-4, atol=1e-5)
        gates[training] = np.asarray(decisions.gate)
    assert np.abs(gates[True] - gates[False]).max() > 1e-3


@pytest.mark.parametrize("name, exploration", [
    pytest.param(name, exploration, marks=()
                 if name in KINDS or exploration == "input_jitter" else pytest.mark.exhaustive)
    for name in ROUTERS for exploration in ("input_jitter", "input_dropout", "sample")
    if exploration != "sample" or name not in ("expert_choice", "hash")])
def test_inference_draws_nothing_and_training_does(name, exploration, monkeypatch):
    layer = make_layer(name, exploration=exploration, jitter_noise=0.3)
    inputs, is_real, token_ids = make_inputs(3, 8)

    def run(training):
        return np.asarray(layer.forward(inputs, padding_mask=is_real, token_ids=token_ids, training=training)[0])

    first, draws = run(training=False), []
    monkeypatch.setattr(random, "uniform", lambda seed, shape: draws.append(shape) or tf.random.uniform(shape))
    np.testing.assert_array_equal(run(training=False), first)
    assert draws == []
    assert name == "hash" or np.abs(run(training=True) - first).max() > 1e-3
    assert len(draws) == (name != "hash") + (name == "top2, random")


# NaN decides like zeros, except that the gate 1/2 of the zeros' second choice may be drawn, and NaN never.
COMPARABLE = [name for name in ROUTERS if name != "top2, random"]


@pytest.mark.parametrize("name", kinds_first((name for name in COMPARABLE if name != "hash"), KINDS))
def test_a_nan_token_decides_like_one_without_preference_and_moves_no_other_token(name):

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.integers(2, 9), st.integers(1, 4), st.sampled_from([0.6, 1.0]), st.integers(0, 2**31 - 1))
    def check(tokens, capacity, share_real, seed):
        layer = cached_layer(name)
        inputs, is_real, _ = make_inputs(4, tokens, seed, share_real)
        group, poisoned = np.arange(4), np.random.RandomState(seed).randint(0, tokens, 4)
        is_real[group, poisoned] = True
        inputs[group, poisoned] = 0
        expected = decide(layer, inputs, is_real, None, capacity)
        inputs[group, poisoned, seed % D_MODEL] = np.nan
        found = decide(layer, inputs, is_real, None, capacity)
        if name == "expert_choice":
            decided = ("token_index", "gate")
            np.testing.assert_array_equal(found.token_index, expected.token_index)
            other = np.asarray(found.token_index) != poisoned[:, None, None]
        else:
            decided = ("expert_index", "slot", "gate")
            other = np.ones((4, tokens), bool)
            other[group, poisoned] = False
        for field in decided:
            mine, theirs = (np.asarray(getattr(decisions, field)) for decisions in (found, expected))
            np.testing.assert_array_equal(mine[other], theirs[other])

    check()


def test_a_nan_token_is_to_sinkhorns_prices_like_padding():
    # It wants every expert alike, so it adds the same to their sums, which are equal before and after.
    layer = make_layer("sinkhorn")
    for seed in range(10):
        inputs, is_real, _ = make_inputs(4, 8, seed, share_real=1.0)
        is_real[:, 3] = False
        expected = decide(layer, inputs, is_real, None, 8, training=True)
        inputs[:, 3], is_real[:, 3] = np.nan, True
        found = decide(layer, inputs, is_real, None, 8, training=True)
        others = np.arange(8) != 3
        np.testing.assert_array_equal(
            np.asarray(found.expert_index)[:, others], np.asarray(expected.expert_index)[:, others])


@pytest.mark.parametrize("name, dispatch, place", [
    (name, dispatch, place) for name in COMPARABLE for dispatch in dispatches(name)[1:] for place in ((0, 0), (1, 2))
    if dispatch == "ragged" or place == (1, 2)])  # "ragged" moves the first token into rows that nobody reads
def test_gathers_keep_a_nan_to_its_own_token(name, dispatch, place):
    layer = make_layer(name, dispatch)
    inputs, is_real, token_ids = make_inputs(3, 8, share_real=0.9)
    is_real[place], inputs[place] = True, 0
    expected, _ = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids)
    inputs[*place, 0] = np.nan
    found, stats = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids)
    others = np.ones((3, 8), bool)
    others[place] = False
    assert np.isfinite(np.asarray(found)[others]).all() and np.abs(found[others]).max() > 1
    np.testing.assert_allclose(np.asarray(found)[others], np.asarray(expected)[others], rtol=1e-6, atol=1e-6)
    assert np.isfinite(stats.fraction_tokens_dropped.total) and np.isfinite(stats.expert_load.total).all()


@pytest.mark.parametrize("name", ROUTERS)
def test_padding_that_is_not_a_number_reaches_no_output(name):
    layer = make_layer(name)
    inputs, is_real, token_ids = make_inputs(3, 8)
    expected, _ = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids)
    inputs[~is_real] = np.nan
    found, _ = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
