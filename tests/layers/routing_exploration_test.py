"""What training does to find out about other experts (appendix C): argmax, input jitter, input dropout, sampling."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Router, routing
from switch_tf.ops import random
from tests.layers.switch_layers import built

PROBS = np.array([0.5, 0.3, 0.15, 0.05])


def make_router(kernel, **kwargs):
    return built(Router(len(kernel[0]), name="router", **kwargs), len(kernel), kernel)


def draw(num_tokens, **kwargs):
    """Decisions on tokens that all have the probabilities PROBS, in 4 groups."""
    router = make_router(np.log(PROBS)[None], exploration="sample", **kwargs)
    with random.random_seed(0):
        return router(np.ones((4, num_tokens // 4, 1), "float32"), expert_capacity=num_tokens, training=True)[0]


def chi_square(counts, probs):
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum()


# Input dropout. Jitter is in routing_test.py.


def test_input_dropout_drops_a_tenth_and_scales_the_rest():
    # One feature, kernel (1, 0): the logit of expert 0 is the feature, and its probability sigmoid(logit).
    router = make_router([[1.0, 0.0]], exploration="input_dropout")
    with random.random_seed(0):
        decisions, _ = router(np.full((1, 4000, 1), 0.9, "float32"), expert_capacity=4000, training=True)
    gate = np.asarray(decisions.gate, np.float64)[0, :, 0]
    logits = np.log(gate / (1 - gate))
    is_dropped = np.isclose(logits, 0, atol=1e-5)
    # 0.9 / (1 - 0.1) = 1
    np.testing.assert_allclose(logits[~is_dropped], 1, atol=1e-5)
    # Standard deviation sqrt(0.1 * 0.9 / 4000) = 0.0047, bound 4 of those.
    assert abs(is_dropped.mean() - 0.1) < 0.019


def test_input_dropout_is_by_element():
    router = make_router(np.eye(4), exploration="input_dropout")
    with random.random_seed(0):
        _, stats = router(np.ones((1, 500, 4), "float32"), expert_capacity=500, training=True)
    # 0.9^4 = 0.656 of the tokens keep all features and have the entropy ln 4; the others have less.
    assert 0.01 < np.log(4) - stats.router_entropy.value < 0.3


# Sampling.


def test_sampling_draws_experts_with_their_probabilities():
    index = np.asarray(draw(4000).expert_index)
    # 3 degrees of freedom: 16.3 is exceeded once in 1000 seeds.
    assert chi_square(np.bincount(index.ravel(), minlength=4), PROBS) < 16.3


def test_sampling_two_experts_draws_them_without_replacement():
    index = np.asarray(draw(4000, policy="top_n", num_selected_experts=2, second_expert_policy="all").expert_index)
    counts = np.bincount((index[..., 0] * 4 + index[..., 1]).ravel(), minlength=16)
    # First i with probability p_i, then j with p_j / (1 - p_i).
    probs = np.array([[0 if i == j else PROBS[i] * PROBS[j] / (1 - PROBS[i]) for j in range(4)] for i in range(4)])
    is_possible = probs.ravel() > 0
    assert counts[~is_possible].sum() == 0
    # 12 - 1 degrees of freedom: 31.3 is exceeded once in 1000 seeds.
    assert chi_square(counts[is_possible], probs.ravel()[is_possible]) < 31.3


def test_the_gate_is_the_probability_of_the_drawn_expert_without_the_noise():
    for policy, second in (("switch", "none"), ("top2", "all")):
        decisions = draw(400, policy=policy, second_expert_policy=second)
        chosen = PROBS[np.asarray(decisions.expert_index)]
        total = chosen.sum(-1, keepdims=True) if policy == "top2" else 1
        np.testing.assert_allclose(decisions.gate, chosen / total, rtol=1e-5)


@pytest.mark.parametrize("policy", ["switch", "ntlb", "batch_prioritized", "top2", "sinkhorn"])
def test_sampling_reaches_every_expert_and_the_gradient_is_that_of_the_probability(policy):
    router = make_router(np.log(PROBS)[None], exploration="sample", policy=policy)
    with random.random_seed(0), tf.GradientTape() as tape:
        decisions, _ = router(np.ones((1, 300, 1), "float32"), expert_capacity=300, training=True)
        total = tf.reduce_sum(decisions.gate[..., 0])
    assert set(np.asarray(decisions.expert_index).ravel().tolist()) == {0, 1, 2, 3}
    assert np.abs(tape.gradient(total, router.kernel.value)).max() > 1


def test_tokens_and_groups_draw_for_themselves_and_steps_anew():
    router = make_router(np.zeros((1, 4)), exploration="sample")
    index = []
    for seed in (0, 0, 1):
        with random.random_seed(seed):
            decisions, _ = router(np.ones((2, 100, 1), "float32"), expert_capacity=100, training=True)
        index.append(np.asarray(decisions.expert_index))
    np.testing.assert_array_equal(index[0], index[1])
    # By chance a quarter agrees; standard deviation sqrt(0.25 * 0.75 / 100) = 0.043, bound 4 of those.
    assert np.mean(index[0][0] == index[0][1]) < 0.43
    assert np.mean(index[0] == index[2]) < 0.43


# The generator's 2^24 numbers, the largest of which is 1 - 2^-24, come up in every large batch.


def test_the_noise_is_finite_for_every_number_that_can_be_drawn():
    extremes = tf.constant([0.0, 2.0**-24, 0.5, 1 - 2.0**-23, 1 - 2.0**-24])
    noise = np.asarray(routing._gumbel(extremes))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) > 0).all()


def test_the_largest_draw_of_one_token_does_not_decide_for_a_group_that_sinkhorn_balances(monkeypatch):
    router = make_router(np.eye(3), exploration="sample", policy="sinkhorn")
    inputs = np.random.RandomState(0).randn(1, 6, 3).astype("float32") * 3
    uniform, index = np.full((1, 6, 3), 0.5, "float32"), []
    for largest in (1 - 2.0**-23, 1 - 2.0**-24):
        uniform[0, 0, 2] = largest
        monkeypatch.setattr(random, "uniform", lambda seed, shape: tf.constant(uniform))
        decisions, _ = router(inputs, expert_capacity=6, training=True)
        index.append(np.asarray(decisions.expert_index).ravel().tolist())
    assert index[0] == index[1]


# Off.


@pytest.mark.parametrize("exploration, training", [
    ("argmax", True), *((name, False) for name in ("argmax", "input_jitter", "input_dropout", "sample"))])
def test_at_inference_every_exploration_is_argmax_which_draws_nothing(exploration, training, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda *_: pytest.fail("a random number was drawn"))
    inputs, kernel = np.random.RandomState(0).randn(2, 9, 4), np.random.RandomState(1).randn(4, 3)
    decisions, _ = make_router(kernel, exploration=exploration, jitter_noise=0.5)(
        inputs, expert_capacity=3, training=training)
    np.testing.assert_array_equal(decisions.expert_index[..., 0], (inputs @ kernel).argmax(-1))
