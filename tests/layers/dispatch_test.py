"""Both ways of carrying tokens to their slots and back: the same numbers, one slot a token, one token a slot."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import SwitchFeedForward, dispatch
from switch_tf.layers.decisions import ExpertChoices, TokenChoices
from switch_tf.ops import forms
from tests.layers.switch_layers import built

WAYS = ("einsum", "index")
both_ways = pytest.mark.parametrize("way", WAYS)


def decisions(expert_index, slot, gate, num_experts=2, capacity=2):
    """TokenChoices of nested lists [group, tokens, choice]."""
    return TokenChoices(tf.constant(expert_index, tf.int32), tf.constant(slot, tf.int32), tf.constant(gate, tf.float32),
                     num_experts, capacity)


# 2 experts with 2 slots; tokens 0 and 2 in expert 0, token 1 in expert 1, token 3 dropped.
BY_HAND = decisions([[[0], [1], [0], [0]]], [[[0], [0], [1], [2]]], [[[0.5], [0.25], [1.0], [0.0]]])


def made_up(seed, num_groups, num_tokens, num_experts, capacity, num_choices, share_real=0.7):
    """Random choices, first come first served, all first choices before all second ones; padding and overflow."""
    rng = np.random.RandomState(seed)
    is_real = rng.rand(num_groups, num_tokens) < share_real
    index = np.argsort(rng.rand(num_groups, num_tokens, num_experts), -1)[..., :num_choices]
    slot = np.full(index.shape, capacity)
    for group in range(num_groups):
        taken = np.zeros(num_experts, int)
        for choice in range(num_choices):
            for token in range(num_tokens):
                expert = index[group, token, choice]
                if is_real[group, token] and taken[expert] < capacity:
                    slot[group, token, choice] = taken[expert]
                    taken[expert] += 1
    gate = np.where(slot < capacity, rng.rand(*slot.shape), 0)
    assert (slot == capacity).any() and (slot < capacity).any()
    return decisions(index, slot, gate, num_experts, capacity)


CASES = [
    # groups, tokens, experts, capacity, choices
    (1, 4, 2, 1, 1), (2, 12, 3, 2, 1), (3, 8, 4, 8, 1), (2, 12, 3, 4, 2), (1, 9, 1, 3, 1), (4, 6, 5, 1, 3)]


# Hand-worked values.


@both_ways
def test_tokens_lie_in_their_slots_and_empty_slots_are_zero(way):
    tokens = tf.constant([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]])
    # [expert, group, capacity, d_model]
    expected = [[[[1, 10], [3, 30]]], [[[2, 20], [0, 0]]]]
    np.testing.assert_array_equal(dispatch.create(BY_HAND, way).dispatch(tokens), expected)


@both_ways
def test_outputs_come_back_gated_and_dropped_tokens_get_exactly_zero(way):
    # The 99 in the empty slot belongs to nobody. 10 * 0.5, 20 * 0.25, 30 * 1, nothing.
    outputs = tf.constant([[[[10.0], [30.0]]], [[[20.0], [99.0]]]])
    np.testing.assert_array_equal(dispatch.create(BY_HAND, way).combine(outputs), [[[5], [5], [30], [0]]])


@both_ways
def test_two_choices_add_up(way):
    carrier = dispatch.create(decisions([[[0, 1], [1, 0]]], [[[0, 1], [0, 2]]], [[[0.5, 0.25], [1, 0]]]), way)
    # Token 0 to both experts, token 1 to expert 1 only: its second choice found no slot.
    np.testing.assert_array_equal(carrier.dispatch(tf.constant([[[1.0], [2.0]]])), [[[[1], [0]]], [[[2], [1]]]])
    # 0.5 * 10 + 0.25 * 40; 1 * 30
    outputs = tf.constant([[[[10.0], [20.0]]], [[[30.0], [40.0]]]])
    np.testing.assert_array_equal(carrier.combine(outputs), [[[15], [30]]])


@both_ways
def test_gradients_by_hand(way):
    tokens = tf.ones((1, 4, 1))
    outputs, gate = tf.constant([[[[10.0], [30.0]]], [[[20.0], [99.0]]]]), BY_HAND.gate
    with tf.GradientTape() as tape:
        tape.watch([tokens, outputs, gate])
        carrier = dispatch.create(BY_HAND, way)
        total = tf.reduce_sum(carrier.dispatch(tokens) * tf.constant([[[[1.0], [2.0]]], [[[3.0], [4.0]]]]))
        total += tf.reduce_sum(carrier.combine(outputs) * tf.constant([[[1.0], [10.0], [100.0], [1000.0]]]))
    gradients = tape.gradient(total, [tokens, outputs, gate])
    # A token gets its slot's weight; the dropped one nothing.
    np.testing.assert_array_equal(gradients[0], [[[1], [3], [2], [0]]])
    # A slot gets its token's weight times the gate; the empty one nothing.
    np.testing.assert_array_equal(gradients[1], [[[[0.5], [100]]], [[[2.5], [0]]]])
    # A gate gets the weight times what came back: 1 * 10, 10 * 20, 100 * 30, and 0 for the dropped one.
    np.testing.assert_array_equal(gradients[2], [[[10], [200], [3000], [0]]])


# Invariants.


@both_ways
@pytest.mark.parametrize("case", CASES)
def test_one_slot_for_each_kept_choice_and_one_token_in_each_slot(way, case):
    num_groups, num_tokens, num_experts, capacity, _ = case
    made = made_up(0, *case)
    # Token i of its group is the i-th unit vector.
    tokens = tf.tile(tf.eye(num_tokens)[None], (num_groups, 1, 1))
    buffers = dispatch.create(made, way).dispatch(tokens).numpy()
    assert buffers.shape == (num_experts, num_groups, capacity, num_tokens)
    assert set(np.unique(buffers).tolist()) <= {0.0, 1.0}
    assert buffers.sum(-1).max() <= 1
    # [group, token, expert]
    received = np.einsum("egcs->gse", buffers)
    expected = np.zeros_like(received)
    for group, token, choice in np.argwhere(made.slot.numpy() < capacity):
        expected[group, token, made.expert_index[group, token, choice]] += 1
    np.testing.assert_array_equal(received, expected)


# Dtype policy.


@both_ways
def test_bfloat16_tokens_arrive_exactly_and_gates_are_not_rounded(way):
    made = made_up(4, 2, 12, 3, 2, 1)
    carrier = dispatch.create(made, way)
    tokens = tf.cast(np.random.RandomState(0).randn(2, 12, 5), tf.bfloat16)
    buffers = carrier.dispatch(tokens)
    assert buffers.dtype == tf.bfloat16
    np.testing.assert_array_equal(
        tf.cast(buffers, tf.float32), dispatch.create(made, "einsum").dispatch(tf.cast(tokens, tf.float32)))
    combined = carrier.combine(tf.ones_like(buffers))
    assert combined.dtype == tf.float32
    np.testing.assert_array_equal(combined, np.tile(made.gate, (1, 1, 5)))


# Choice.


@pytest.mark.parametrize("device_type, expected", [
    ("CPU", dispatch.Index), ("GPU", dispatch.Index), ("TPU", dispatch.Einsum)])
def test_auto_is_einsum_on_tpu_and_index_elsewhere(device_type, expected, monkeypatch):
    monkeypatch.setattr(forms, "device_type", lambda: device_type)
    assert type(dispatch.create(made_up(0, *CASES[0]), "auto")) is expected
    choices = ExpertChoices(tf.zeros((1, 2, 1), tf.int32), tf.ones((1, 2, 1)), 4, 2, 1)
    assert dispatch.fastest(choices) == expected.__name__.lower()


@pytest.mark.parametrize("num_tokens, capacity, expected", [
    # 4 experts: rows without padding cost 4 * 40 rows more, so 160 + 160 against 4 * capacity.
    (160, 80, "index"), (160, 81, "ragged"), (320, 100, "index"), (320, 121, "ragged"),
    # Fewer tokens than experts; a step of decoding.
    (3, 3, "ragged"), (1, 1, "ragged")])
def test_auto_leaves_out_empty_slots_where_that_is_worth_a_product_for_each_expert(num_tokens, capacity, expected,
                                                                                   monkeypatch):
    monkeypatch.setattr(forms, "device_type", lambda: "CPU")
    index = np.arange(num_tokens).reshape(1, num_tokens, 1) % 4
    assert dispatch.fastest(decisions(index, np.zeros_like(index), np.ones(index.shape), 4, capacity)) == expected


def test_experts_that_choose_may_have_outputs_of_another_width():
    x, outputs = np.random.RandomState(0).randn(2, 6, 3).astype("float32"), []
    for way in WAYS:
        layer = built(SwitchFeedForward(4, 5, router="expert_choice", output_dim=7, dispatch=way, name="layer"), 3)
        outputs.append(layer.forward(x)[0])
    assert outputs[0].shape == (2, 6, 7)
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
