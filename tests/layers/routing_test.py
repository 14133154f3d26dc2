"""The Switch router: who goes where, into which slot, with what gate, and in which precision."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Router
from switch_tf.ops import random
from tests.layers.switch_layers import built

LN3 = float(np.log(3))


def make_router(kernel, **kwargs):
    return built(Router(len(kernel[0]), **kwargs), len(kernel), kernel)


def choosing(*experts, num_experts=2):
    """Tokens that choose these experts under an identity kernel: <float32>[1, tokens, num_experts]."""
    return np.eye(num_experts, dtype="float32")[None, list(experts)]


def first(array):
    """The only choice of the only group."""
    return np.asarray(array)[0, :, 0].tolist()


# Hand-worked values.


@pytest.mark.parametrize("capacity", [2, tf.constant(2)], ids=type)
def test_the_first_tokens_of_an_expert_are_kept_in_order(capacity):
    decisions, _ = make_router(np.eye(2))(choosing(0, 1, 0, 0, 1, 0), expert_capacity=capacity)
    assert first(decisions.expert_index) == [0, 1, 0, 0, 1, 0]
    # Expert 0: tokens 0 and 2 take slots 0 and 1, tokens 3 and 5 find none. Expert 1: tokens 1 and 4.
    assert first(decisions.slot) == [0, 0, 1, 2, 1, 2]


def test_the_gate_is_the_top_probability_as_it_is():
    # Logits (ln 3, 0, 0): probabilities 3/5, 1/5, 1/5, and the gate is 3/5, not 1.
    decisions, _ = make_router(np.eye(3))(LN3 * choosing(0, 2, num_experts=3), expert_capacity=2)
    np.testing.assert_allclose(first(decisions.gate), [0.6, 0.6], rtol=1e-6)


def test_ties_go_to_the_lowest_expert():
    x = np.array([[[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]], "float32")
    decisions, _ = make_router(np.eye(3))(x, expert_capacity=2)
    assert first(decisions.expert_index) == [0, 1]


def test_the_statistics_of_three_tokens_and_one_padding():
    # Probabilities (3/4, 1/4) twice, then (1/4, 3/4); the last token is padding. One slot each: token 1 is dropped.
    mask = np.array([[True, True, True, False]])
    _, stats = make_router(np.eye(2))(LN3 * choosing(0, 0, 1, 1), padding_mask=mask, expert_capacity=1)
    expected = {
        "expert_load": [2 / 3, 1 / 3],
        "fraction_tokens_dropped": 1 / 3,
        "router_entropy": np.log(4) - 0.75 * LN3,
        "router_confidence": 0.75,
        # 2 kept tokens in 1 group * 1 slot * 2 experts
        "expert_usage": 1.0,
        # f = (2/3, 1/3), P = (7/12, 5/12): 2 * (14 + 5) / 36
        "load_balancing_loss": 19 / 18,
        # Every normaliser is 3 + 1.
        "router_z_loss": np.log(4) ** 2,
    }
    assert set(expected) == set(stats._fields)
    for name, value in expected.items():
        mean = getattr(stats, name)
        np.testing.assert_allclose(mean.value, value, rtol=1e-6, err_msg=name)
        assert mean.weight == (2 if name == "expert_usage" else 3), name
    np.testing.assert_array_equal(stats.expert_load.total, [2, 1])


def test_the_gradient_of_the_gate_reaches_the_router():
    # Gate p = 3/4 of the kept token x = (ln 3, 0): d p / d logits = (p (1 - p), -p (1 - p)) = (3/16, -3/16), times x.
    router = make_router(np.eye(2))
    x = tf.constant(LN3 * choosing(0, 0, 1))
    with tf.GradientTape() as tape:
        tape.watch(x)
        decisions, _ = router(x, padding_mask=[[True, True, False]], expert_capacity=1)
        total = tf.reduce_sum(decisions.gate)
    kernel_gradient, x_gradient = tape.gradient(total, [router.kernel.value, x])
    np.testing.assert_allclose(kernel_gradient, [[3 / 16 * LN3, -3 / 16 * LN3], [0, 0]], rtol=1e-5)
    # The dropped token 1 and the padding have none.
    np.testing.assert_allclose(x_gradient, [[[3 / 16, -3 / 16], [0, 0], [0, 0]]], rtol=1e-5)


def test_the_gradient_of_both_losses_reaches_the_router():
    router = make_router(np.eye(2))
    x = LN3 * choosing(0, 0)
    for name, expected in (
            # f = (1, 0): the loss is 2 P_0, and d P_0 / d logits = (3/16, -3/16)
            ("load_balancing_loss", [2 * 3 / 16 * LN3, -2 * 3 / 16 * LN3]),
            # 2 lse * probabilities
            ("router_z_loss", [2 * np.log(4) * 3 / 4 * LN3, 2 * np.log(4) / 4 * LN3])):
        with tf.GradientTape() as tape:
            _, stats = router(x, expert_capacity=2)
            loss = getattr(stats, name).value
        gradient = tape.gradient(loss, router.kernel.value)
        np.testing.assert_allclose(gradient, [expected, [0, 0]], rtol=1e-5, err_msg=name)


# Jitter.


def logits_of_ones(router, num_tokens, training=True):
    """What jitter made of the logits of ones under the kernel (1, 0): their gate is sigmoid(logit)."""
    x = np.ones((1, num_tokens, 1), "float32")
    gate = np.asarray(router(x, expert_capacity=num_tokens, training=training)[0].gate, np.float64)[0, :, 0]
    return np.log(gate / (1 - gate))


def test_jitter_is_uniform_around_1_in_training_only():
    router = make_router([[1.0, 0.0]], jitter_noise=0.1)
    with random.random_seed(0):
        noise = logits_of_ones(router, 1000)
    assert noise.min() >= 0.9 - 1e-5 and noise.max() <= 1.1 + 1e-5
    assert noise.min() < 0.902 and noise.max() > 1.098
    # Standard deviation 0.2 / sqrt(12) = 0.0577, of the mean of 1000 0.0018; the bound is 4 of those.
    assert abs(noise.mean() - 1) < 0.0073
    np.testing.assert_allclose(logits_of_ones(router, 10, training=False), 1, atol=1e-5)
    without = make_router([[1.0, 0.0]], jitter_noise=0.0)
    np.testing.assert_allclose(logits_of_ones(without, 10), 1, atol=1e-5)


def test_jitter_differs_between_features_and_tokens():
    # The first feature alone decides the logit of expert 0, the second that of expert 1: without jitter they tie.
    x = np.ones((2, 50, 2), "float32")
    with random.random_seed(0):
        decisions, _ = make_router(np.eye(2), jitter_noise=0.1)(x, expert_capacity=50, training=True)
    assert len(set(np.asarray(decisions.gate).ravel().tolist())) > 95
    assert 25 < np.sum(decisions.expert_index) < 75


# Invariants.


def test_what_padding_holds_does_not_matter():
    rng = np.random.RandomState(0)
    router = make_router(rng.randn(4, 4))
    x, mask = rng.randn(2, 8, 4).astype("float32"), rng.rand(2, 8) < 0.6
    expected = router(x, padding_mask=mask, expert_capacity=2)
    changed = router(np.where(mask[..., None], x, 7.0).astype("float32"), padding_mask=mask, expert_capacity=2)
    for mine, theirs in zip(*(keras.tree.flatten((decisions[1:3], stats)) for decisions, stats in (changed, expected)),
                            strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_more_than_256_tokens_of_one_expert_are_counted_exactly_in_bfloat16():
    # bfloat16 cannot count beyond 256.
    router = make_router(np.eye(2), dtype="mixed_bfloat16", router_dtype="bfloat16")
    decisions, stats = router(np.tile(choosing(0), (1, 600, 1)), expert_capacity=500)
    assert first(decisions.slot) == [min(token, 500) for token in range(600)]
    assert float(stats.expert_load.total[0]) == 600


# Dtype policy.


@pytest.mark.parametrize("policy, router_dtype, expert, gate", [
    *((policy, "float32", 1, 1 / (1 + np.exp(-0.001))) for policy in ("float32", "mixed_bfloat16", "bfloat16")),
    ("mixed_bfloat16", "bfloat16", 0, 0.5)])
def test_the_kernel_is_float32_and_rounded_by_router_dtype_only(policy, router_dtype, expert, gate):
    # In bfloat16 1.001 is 1 and the tie goes to expert 0 with gate 1/2.
    router = make_router([[1.0, 1.001]], dtype=policy, router_dtype=router_dtype)
    decisions, stats = router(tf.ones((1, 1, 1), router.compute_dtype), expert_capacity=1)
    assert router.kernel.dtype == "float32"
    assert first(decisions.expert_index) == [expert]
    np.testing.assert_allclose(first(decisions.gate), [gate], rtol=2e-7)
    assert decisions.gate.dtype == tf.float32
    assert all(mean.total.dtype == mean.weight.dtype == tf.float32 for mean in stats)


def test_jitter_is_drawn_and_applied_in_float32():
    # 1 + 0.001 u has three values in bfloat16 (0.996, 1, 1.008), in float32 as many as draws.
    router = make_router([[1.0, 0.0]], dtype="mixed_bfloat16", jitter_noise=0.001)
    assert len(set(logits_of_ones(router, 20).tolist())) > 15
