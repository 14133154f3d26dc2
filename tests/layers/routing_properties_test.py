"""What must hold for every batch: shapes, paddings, capacities and ties drawn at random."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from switch_tf.layers import Router, dispatch, grouping

D_MODEL = 3


@st.composite
def routed(draw):
    """Decisions of a router without jitter on a random batch; inputs of few values, so that ties are common."""
    groups, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    num_experts, capacity = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    random = np.random.RandomState(draw(st.integers(0, 2**31 - 1)))
    inputs = random.randint(-1, 2, (groups, tokens, D_MODEL)).astype("float32")
    is_real = random.rand(groups, tokens) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    router = Router(num_experts)
    router.build((None, None, D_MODEL))
    router.kernel.assign(random.randint(-2, 3, (D_MODEL, num_experts)))
    decisions, stats = router(inputs, padding_mask=is_real, expert_capacity=capacity)
    return inputs, is_real, num_experts, capacity, decisions, stats


@settings(max_examples=100, deadline=None)
@given(routed())
def test_slots_are_given_once_in_order_within_capacity_and_to_real_tokens_only(case):
    _, is_real, num_experts, capacity, decisions, stats = case
    expert, slot = np.asarray(decisions.expert_index)[..., 0], np.asarray(decisions.slot)[..., 0]
    gate = np.asarray(decisions.gate)[..., 0]
    kept = slot < capacity
    assert not np.any(kept & ~is_real)
    np.testing.assert_array_equal(gate > 0, kept)
    for group in range(len(slot)):
        for one in range(num_experts):
            chosen = np.flatnonzero((expert[group] == one) & is_real[group])
            # the first `capacity` that chose it get slots 0, 1, ...; the others none
            np.testing.assert_array_equal(slot[group, chosen], np.minimum(np.arange(len(chosen)), capacity))
    assert float(stats.fraction_tokens_dropped.total) == np.sum(is_real & ~kept)
    assert float(np.sum(stats.expert_load.total)) == np.sum(is_real)


@settings(max_examples=60, deadline=None)
@given(routed())
def test_both_dispatches_move_the_same_rows_and_a_round_trip_is_the_gate_times_the_token(case):
    inputs, _, num_experts, capacity, decisions, _ = case
    carriers = [kind(decisions, num_experts, capacity) for kind in (dispatch.Einsum, dispatch.Index)]
    buffers = [np.asarray(carrier.dispatch(inputs)) for carrier in carriers]
    np.testing.assert_array_equal(*buffers)
    for carrier in carriers:
        np.testing.assert_allclose(carrier.combine(buffers[0]), inputs * np.asarray(decisions.gate), rtol=1e-6)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 64))
def test_groups_divide_the_tokens_and_are_as_few_as_the_size_allows(num_tokens, group_size, multiple):
    groups = grouping.global_groups(num_tokens, group_size, multiple)
    possible = [count for count in range(multiple, num_tokens + 1, multiple)
                if num_tokens % count == 0 and num_tokens // count <= group_size]
    assert (groups and groups.count) == (possible[0] if possible else None)
