"""The Switch router: who goes where, into which slot, with what gate, and in which precision."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import Router
from switch_tf.ops import random

LN3 = float(np.log(3))


def make_router(kernel, **kwargs):
    kernel = np.asarray(kernel, "float32")
    router = Router(num_experts=kernel.shape[1], **kwargs)
    router.build((None, None, kernel.shape[0]))
    router.kernel.assign(kernel)
    return router


def choosing(*experts, num_experts=2):
    """Tokens that choose these experts under an identity kernel: <float32>[1, tokens, num_experts]."""
    return np.eye(num_experts, dtype="float32")[None, list(experts)]


def first(array):
    """The only choice of the only group."""
    return np.asarray(array)[0, :, 0].tolist()


def naive_slots(index, mask, capacity):
    """Slot of every token, by a loop over groups and tokens in order."""
    slots = np.full(index.shape, capacity)
    for group in range(index.shape[0]):
        taken = {}
        for token in range(index.shape[1]):
            expert = index[group, token]
            if mask[group, token] and taken.get(expert, 0) < capacity:
                slots[group, token] = taken.get(expert, 0)
                taken[expert] = slots[group, token] + 1
    return slots


# Hand-worked values.


def test_the_first_tokens_of_an_expert_are_kept_in_order():
    decisions, _ = make_router(np.eye(2))(choosing(0, 1, 0, 0, 1, 0), expert_capacity=2)
    assert first(decisions.expert_index) == [0, 1, 0, 0, 1, 0]
    # Expert 0: tokens 0 and 2 take slots 0 and 1, tokens 3 and 5 find none. Expert 1: tokens 1 and 4.
    assert first(decisions.slot) == [0, 0, 1, 2, 1, 2]


def test_groups_do_not_compete():
    tokens = np.concatenate([choosing(0, 0), choosing(0, 1)])
    decisions, _ = make_router(np.eye(2))(tokens, expert_capacity=1)
    np.testing.assert_array_equal(decisions.slot[..., 0], [[0, 1], [0, 0]])


def test_the_gate_is_the_top_probability_as_it_is():
    # Logits (ln 3, 0, 0): probabilities 3/5, 1/5, 1/5, and the gate is 3/5, not 1.
    decisions, _ = make_router(np.eye(3))(LN3 * choosing(0, 2, num_experts=3), expert_capacity=2)
    np.testing.assert_allclose(first(decisions.gate), [0.6, 0.6], rtol=1e-6)


def test_a_dropped_token_has_gate_0():
    decisions, _ = make_router(np.eye(2))(LN3 * choosing(0, 0), expert_capacity=1)
    np.testing.assert_allclose(first(decisions.gate), [0.75, 0], rtol=1e-6)


def test_ties_go_to_the_lowest_expert():
    x = np.array([[[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]], "float32")
    decisions, _ = make_router(np.eye(3))(x, expert_capacity=2)
    assert first(decisions.expert_index) == [0, 1]


def test_padding_is_not_routed_and_takes_no_slot():
    mask = np.array([[False, True, False, True]])
    decisions, _ = make_router(np.eye(2))(LN3 * choosing(0, 0, 0, 0), padding_mask=mask, expert_capacity=2)
    assert first(decisions.slot) == [2, 0, 2, 1]
    np.testing.assert_allclose(first(decisions.gate), [0, 0.75, 0, 0.75], rtol=1e-6)


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


def test_expert_usage_counts_empty_slots():
    # 2 groups * 3 slots * 2 experts = 12 slots, 4 tokens
    _, stats = make_router(np.eye(2))(np.concatenate([choosing(0, 1), choosing(0, 0)]), expert_capacity=3)
    assert stats.expert_usage == (4, 12)


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


def test_evaluation_is_deterministic_and_training_draws_anew():
    router = make_router(np.eye(2), jitter_noise=0.1)
    gates = {training: [tuple(first(router(choosing(0, 1), expert_capacity=2, training=training)[0].gate))
                        for _ in range(2)] for training in (False, True)}
    assert gates[False][0] == gates[False][1]
    assert gates[True][0] != gates[True][1]


def test_jitter_is_the_same_for_the_whole_batch_and_its_parts():
    router = make_router(np.eye(4), jitter_noise=0.5)
    x = np.random.RandomState(0).randn(4, 3, 4).astype("float32")
    with random.random_seed(3):
        whole, _ = router(x, expert_capacity=3, training=True)
        parts = []
        for index in range(2):
            with partitioning.part_of_batch(2, index):
                parts.append(router(x[2 * index:2 * index + 2], expert_capacity=3, training=True)[0].gate)
    # Some processors take the exponential of a last, odd element in another way: by one unit in the last place.
    np.testing.assert_allclose(np.concatenate(parts), whole.gate, rtol=3e-7)


# Invariants and equivalence.


@pytest.mark.parametrize("capacity", [1, 2, 5, 16])
@pytest.mark.parametrize("use_tensor", [False, True])
def test_slots_are_those_of_a_loop_over_tokens(capacity, use_tensor):
    rng = np.random.RandomState(capacity)
    x, mask = rng.randn(3, 16, 4).astype("float32"), rng.rand(3, 16) < 0.7
    kernel = rng.randn(4, 4).astype("float32")
    decisions, stats = make_router(kernel)(
        x, padding_mask=mask, expert_capacity=tf.constant(capacity) if use_tensor else capacity)
    index, slot = (np.asarray(array)[..., 0] for array in (decisions.expert_index, decisions.slot))
    np.testing.assert_array_equal(index, (x.astype(np.float64) @ kernel).argmax(-1))
    np.testing.assert_array_equal(slot, naive_slots(index, mask, capacity))
    # One token for each slot, never more than `capacity` of them, and padding in none.
    kept = np.argwhere(slot < capacity)
    places = {(group, index[group, token], slot[group, token]) for group, token in kept}
    assert len(places) == len(kept) == int(stats.expert_usage.total)
    assert mask[tuple(kept.T)].all()
    np.testing.assert_array_equal(np.asarray(decisions.gate)[..., 0] > 0, slot < capacity)
    assert float(stats.fraction_tokens_dropped.total) == mask.sum() - len(kept)


def test_what_padding_holds_does_not_matter():
    rng = np.random.RandomState(0)
    router = make_router(rng.randn(4, 4))
    x, mask = rng.randn(2, 8, 4).astype("float32"), rng.rand(2, 8) < 0.6
    expected = router(x, padding_mask=mask, expert_capacity=2)
    changed = router(np.where(mask[..., None], x, 7.0).astype("float32"), padding_mask=mask, expert_capacity=2)
    np.testing.assert_array_equal(changed[0].slot, expected[0].slot)
    np.testing.assert_array_equal(changed[0].gate, expected[0].gate)
    for mine, theirs in zip(changed[1], expected[1], strict=True):
        np.testing.assert_array_equal(mine.total, theirs.total)


def test_a_mask_of_ones_is_no_mask():
    rng = np.random.RandomState(1)
    router, x = make_router(rng.randn(4, 3)), rng.randn(2, 5, 4).astype("float32")
    masked, unmasked = (router(x, padding_mask=mask, expert_capacity=2) for mask in (np.ones((2, 5), bool), None))
    for mine, theirs in zip(masked[0], unmasked[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(masked[1], unmasked[1], strict=True):
        np.testing.assert_array_equal(mine.total, theirs.total)
        np.testing.assert_array_equal(mine.weight, theirs.weight)


def test_more_than_256_tokens_of_one_expert_are_counted_exactly_in_bfloat16():
    # bfloat16 cannot count beyond 256.
    router = make_router(np.eye(2), dtype="mixed_bfloat16", router_dtype="bfloat16")
    decisions, stats = router(np.tile(choosing(0), (1, 600, 1)), expert_capacity=500)
    assert first(decisions.slot) == [min(token, 500) for token in range(600)]
    assert float(stats.expert_load.total[0]) == 600


# Dtype policy and serialisation.


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_the_kernel_is_float32_and_never_rounded(policy):
    # In bfloat16 1.001 is 1 and the tie would go to expert 0 with gate 1/2.
    router = make_router([[1.0, 1.001]], dtype=policy)
    decisions, stats = router(tf.ones((1, 1, 1), router.compute_dtype), expert_capacity=1)
    assert router.kernel.dtype == "float32"
    assert first(decisions.expert_index) == [1]
    np.testing.assert_allclose(first(decisions.gate), [1 / (1 + np.exp(-0.001))], rtol=2e-7)
    assert decisions.gate.dtype == tf.float32
    assert all(mean.total.dtype == mean.weight.dtype == tf.float32 for mean in stats)


def test_router_dtype_bfloat16_decides_the_same_tie_differently():
    decisions, stats = make_router([[1.0, 1.001]], dtype="mixed_bfloat16", router_dtype="bfloat16")(
        tf.ones((1, 1, 1), tf.bfloat16), expert_capacity=1)
    assert first(decisions.expert_index) == [0]
    assert first(decisions.gate) == [0.5]
    assert stats.router_z_loss.total.dtype == tf.float32


def test_near_ties_of_logits_are_decided_in_float32():
    # Inputs and kernel are exact in bfloat16, the logits 256 and 257 are not: 257 becomes 256 there.
    x, kernel = tf.constant([[[256.0, 1.0]]], tf.bfloat16), [[1.0, 1.0], [0.0, 1.0]]
    chosen = {}
    for router_dtype in ("float32", "bfloat16"):
        router = make_router(kernel, dtype="mixed_bfloat16", router_dtype=router_dtype)
        chosen[router_dtype] = first(router(x, expert_capacity=1)[0].expert_index)
    assert chosen == {"float32": [1], "bfloat16": [0]}


def test_jitter_is_drawn_and_applied_in_float32():
    # 1 + 0.001 u has three values in bfloat16 (0.996, 1, 1.008), in float32 as many as draws.
    router = make_router([[1.0, 0.0]], dtype="mixed_bfloat16", jitter_noise=0.001)
    assert len(set(logits_of_ones(router, 20).tolist())) > 15


def test_the_kernel_starts_truncated_normal():
    router = Router(num_experts=64, init_scale=0.4)
    router.build((None, None, 1000))
    # sigma = sqrt(0.4 / 1000) = 0.02, cut at 2 sigma: standard deviation 0.8796 sigma
    kernel = router.kernel.numpy()
    assert np.abs(kernel).max() <= 0.04 + 1e-6
    np.testing.assert_allclose(kernel.std(), 0.8796 * 0.02, rtol=0.02)
    assert router.kernel.logical_axes == ("embed", "router_expert")


def test_its_config_makes_it_again():
    arguments = {"num_experts": 3, "num_selected_experts": 1, "policy": "switch", "jitter_noise": 0.2,
                 "router_dtype": "bfloat16", "init_scale": 0.5, "semantics": "mtf", "name": "mine"}
    config = Router(**arguments, dtype="mixed_bfloat16").get_config()
    again = Router.from_config(config)
    assert again.get_config() == config
    assert again.dtype_policy.name == "mixed_bfloat16"
    for name, value in arguments.items():
        assert getattr(again, name) == value


# Refusals.


@pytest.mark.parametrize("arguments, message", [
    ({"policy": "swich"}, r"policy must be one of 'switch', .* or .*, not 'swich'\. Did you mean 'switch'\?"),
    ({"router_dtype": "float16"}, r"router_dtype must be one of 'float32', 'bfloat16', not 'float16'"),
    ({"semantics": "t5"}, "semantics must be one of 'switch_tf', 'mtf', 't5x', 'hf', not 't5'"),
    ({"num_selected_experts": 2}, "The switch policy selects 1 expert for each token, not 2"),
    ({"jitter_noise": 1.0}, r"jitter_noise must be a number in \[0, 1\), not 1.0"),
    ({"jitter_noise": -0.1}, r"jitter_noise must be a number in \[0, 1\), not -0.1"),
])
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Router(num_experts=2, **arguments)
