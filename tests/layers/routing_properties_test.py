"""What must hold for every batch: shapes, capacities, paddings, ties, NaN and infinite inputs drawn at random.

Each example is a batch of up to 12 groups, which are routed by themselves.
"""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from keras import ops

from switch_tf.layers import Router, dispatch
from switch_tf.ops import random
from tests.layers.switch_layers import ROUTERS, built, in_parts, kinds_first

# One expert alone has probability 1, and Keras warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax")

D_MODEL = 3
# One of each kind, for `make test`: a token's choice, in rounds, in turn by confidence, by draw, the experts'.
KINDS = ("switch", "ntlb", "batch_prioritized, 2", "top2, random", "expert_choice")
# What they draw or balance, they do in training; jitter is left to the tests of the layer.
IN_TRAINING = ("switch, sampled", "top2, random", "sinkhorn")


def num_choices(name):
    return ROUTERS[name].get("num_selected_experts", 2 if "top2" in name else 1)


@functools.cache
def cached_router(name, num_experts):
    return built(Router(num_experts, **{"exploration": "argmax", **ROUTERS[name]}, name="router"), D_MODEL)


class Batch(NamedTuple):
    """A random batch of groups and what a router is told of it."""

    inputs: np.ndarray
    kernel: np.ndarray
    is_real: np.ndarray
    token_ids: np.ndarray
    capacity: int

    @property
    def num_experts(self):
        return self.kernel.shape[1]


@st.composite
def batches(draw, has_ties=True, is_finite=False, min_experts=1):
    """Inputs of few values, so that ties are common, or normal ones; some tokens are not numbers or infinite."""
    groups, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 10))
    num_experts, capacity = draw(st.integers(min_experts, 5)), draw(st.integers(1, 6))
    rng = np.random.RandomState(draw(st.integers(0, 2**31 - 1)))
    if has_ties and draw(st.booleans()):
        inputs = rng.randint(-1, 2, (groups, tokens, D_MODEL)).astype("float32")
        kernel = rng.randint(-2, 3, (D_MODEL, num_experts)).astype("float32")
    else:
        inputs, kernel = (rng.randn(*shape).astype("float32")
                          for shape in ((groups, tokens, D_MODEL), (D_MODEL, num_experts)))
    for value in () if is_finite else draw(st.sampled_from([(), (np.nan,), (np.inf, -np.inf), (np.nan, np.inf)])):
        inputs[rng.rand(*inputs.shape) < 0.1] = value
    is_real = rng.rand(groups, tokens) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    return Batch(inputs, kernel, is_real, rng.randint(0, 100, (groups, tokens)).astype("int32"), capacity)


def route(name, batch):
    router = cached_router(name, batch.num_experts)
    if name != "hash":
        router.kernel.assign(batch.kernel)
    with random.random_seed(1):
        return router(batch.inputs, padding_mask=batch.is_real, expert_capacity=batch.capacity,
                      token_ids=batch.token_ids, training=name in IN_TRAINING)


def scores(batch):
    """Preferences as the policies see them, and confidences, -1 where a token is not a number."""
    logits = tf.einsum("gsm,me->gse", batch.inputs, batch.kernel)
    selection = np.nan_to_num(np.asarray(logits), nan=-1e9, posinf=1e9, neginf=-1e9)
    return selection, np.nan_to_num(np.asarray(ops.max(ops.softmax(logits), axis=-1)), nan=-1.0)


def best(row, count):
    """The `count` largest of a row, the lowest index first where they are equal."""
    return np.argsort(-row, kind="stable")[:count].tolist()


def is_filled(decisions, batch):
    """Where a choice, or an expert's slot, found its counterpart."""
    if hasattr(decisions, "slot"):
        return np.asarray(decisions.slot) < batch.capacity
    return np.asarray(decisions.token_index) < batch.inputs.shape[1]


def check_slots(name, batch, decisions):
    """One slot for a choice, one token for a slot, no gaps, never more than the capacity, padding nowhere."""
    (groups, tokens), gate = batch.is_real.shape, np.asarray(decisions.gate)
    filled = is_filled(decisions, batch)
    assert gate.dtype == np.float32 and np.all(gate[~filled] == 0)
    if name == "expert_choice":
        index = np.asarray(decisions.token_index)
        assert index.dtype == np.int32
        assert index.shape == gate.shape == (groups, batch.num_experts, min(batch.capacity, tokens))
        assert np.all((index >= 0) & (index <= tokens))
        for group, expert in np.ndindex(*index.shape[:2]):
            taken = index[group, expert][filled[group, expert]].tolist()
            assert len(set(taken)) == len(taken) and batch.is_real[group][taken].all()
        return
    expert, slot = np.asarray(decisions.expert_index), np.asarray(decisions.slot)
    assert expert.dtype == slot.dtype == np.int32
    assert expert.shape == slot.shape == gate.shape == (groups, tokens, num_choices(name))
    assert np.all((expert >= 0) & (expert < batch.num_experts)) and np.all((slot >= 0) & (slot <= batch.capacity))
    assert not filled[~batch.is_real].any()
    assert all(len(set(row)) == len(row) for row in expert.reshape(-1, expert.shape[-1]).tolist())
    for group in range(groups):
        for one in range(batch.num_experts):
            taken = sorted(slot[group][(expert[group] == one) & filled[group]].tolist())
            assert taken == list(range(len(taken))) and len(taken) <= batch.capacity


def check_queues(name, batch, decisions):
    """First choices before second ones, then in order of tokens, or of confidence for batch_prioritized."""
    selection, confidence = scores(batch)
    expert, slot = np.asarray(decisions.expert_index), np.asarray(decisions.slot)
    for group, is_real in enumerate(batch.is_real):
        place = np.arange(len(is_real))
        if "batch" in name:
            place = np.argsort(np.argsort(-confidence[group], kind="stable"))
        for token in np.flatnonzero(is_real):
            if name == "hash":
                assert expert[group, token, 0] == batch.token_ids[group, token] % batch.num_experts
            elif name not in ("sinkhorn", "switch, sampled"):
                assert expert[group, token].tolist() == best(selection[group, token], expert.shape[-1])
        for one in range(batch.num_experts):
            in_line = sorted((choice, place[token], slot[group, token, choice]) for token, choice in
                             np.argwhere((expert[group] == one) & is_real[:, None]))
            if name == "top2, none":
                assert all(given == batch.capacity for choice, _, given in in_line if choice)
                in_line = [entry for entry in in_line if not entry[0]]
            if name in ("top2, threshold", "top2, random"):  # some second choices do not stand in line
                in_line = [entry for entry in in_line if not entry[0] or entry[2] < batch.capacity]
            assert [given for *_, given in in_line] == [min(i, batch.capacity) for i in range(len(in_line))]


def check_ntlb(batch, decisions):
    """A token is with its best expert but those that were full before its turn came: in rounds, then in order."""
    selection, _ = scores(batch)
    expert, slot = (np.asarray(array)[..., 0] for array in decisions[:2])
    for group, is_real in enumerate(batch.is_real):
        turns = {one: [] for one in range(batch.num_experts)}
        for token in np.flatnonzero(is_real):
            ranks = best(selection[group, token], 4)
            is_kept = slot[group, token] < batch.capacity
            attempt = ranks.index(expert[group, token])
            assert is_kept or attempt == len(ranks) - 1
            for one in ranks[:attempt + (not is_kept)]:
                assert np.sum((expert[group] == one) & (slot[group] < batch.capacity)) == batch.capacity
            if is_kept:
                turns[expert[group, token]].append((attempt, token, slot[group, token]))
        for taken in turns.values():
            assert [given for *_, given in sorted(taken)] == list(range(len(taken)))


def check_experts_take_the_best(batch, decisions):
    """Each expert takes the real tokens of highest probability; of equal ones the earliest."""
    selection, _ = scores(batch)
    probs, num_tokens = np.array(ops.softmax(selection, axis=-1)), batch.inputs.shape[1]
    probs[~batch.is_real] = -1
    for group, expert in np.ndindex(len(probs), batch.num_experts):
        row = probs[group, :, expert]
        expected = [token if row[token] >= 0 else num_tokens for token in best(row, batch.capacity)]
        assert np.asarray(decisions.token_index)[group, expert].tolist() == expected


def check_statistics(name, batch, decisions, stats):
    """They count what the decisions say: first choices, tokens that nobody took, filled slots."""
    filled, num_real = is_filled(decisions, batch), batch.is_real.sum()
    load = np.asarray(stats.expert_load.total)
    assert load.sum() == stats.expert_load.weight == (filled.sum() if name == "expert_choice" else num_real)
    if name == "expert_choice":
        served = sum(len(set(index[index < batch.inputs.shape[1]].tolist()))
                     for index in np.asarray(decisions.token_index))
    else:
        served = filled.any(-1).sum()
    if name != "expert_choice":
        # With no token left behind, the expert that took a token may not be the one that it preferred.
        first = scores(batch)[0].argmax(-1) if name == "ntlb" else np.asarray(decisions.expert_index)[..., 0]
        first = first[batch.is_real]
        np.testing.assert_array_equal(load, np.bincount(first, minlength=batch.num_experts))
    assert stats.fraction_tokens_dropped == (num_real - served, num_real)
    assert stats.expert_usage == (filled.sum(), batch.is_real.shape[0] * batch.num_experts * batch.capacity)


@pytest.mark.parametrize("name", kinds_first(ROUTERS, KINDS))
def test_slots_order_and_statistics_hold_for_every_batch(name):

    @settings(max_examples=24, deadline=None, derandomize=True)
    @given(batches(min_experts=num_choices(name)))
    def check(batch):
        decisions, stats = route(name, batch)
        check_slots(name, batch, decisions)
        check_statistics(name, batch, decisions, stats)
        if name == "ntlb":
            check_ntlb(batch, decisions)
        elif name == "expert_choice":
            check_experts_take_the_best(batch, decisions)
        else:
            check_queues(name, batch, decisions)

    check()


@pytest.mark.parametrize("name", kinds_first((
    "switch", "ntlb", "batch_prioritized, 2", "top2, all", "top2, threshold", "top_n, 3", "expert_choice", "sinkhorn"),
    KINDS))
def test_renaming_the_experts_renames_the_decisions_and_changes_nothing_else(name):

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(batches(has_ties=False, is_finite=True, min_experts=num_choices(name)), st.integers(0, 1000))
    def check(batch, seed):
        if name == "sinkhorn":  # a token alone in its group has no preference left once the experts' sums are equal
            assume(batch.is_real.shape[1] > 1)
            batch = batch._replace(is_real=batch.is_real | (np.arange(batch.is_real.shape[1]) < 2))
        new = np.random.RandomState(seed).permutation(batch.num_experts)
        decisions, stats = route(name, batch)
        renamed, renamed_stats = route(name, batch._replace(kernel=batch.kernel[:, np.argsort(new)]))
        if name == "expert_choice":
            np.testing.assert_array_equal(np.asarray(renamed.token_index)[:, new], decisions.token_index)
            np.testing.assert_allclose(np.asarray(renamed.gate)[:, new], decisions.gate, rtol=1e-5)
        else:
            real = batch.is_real
            np.testing.assert_array_equal(
                np.asarray(renamed.expert_index)[real], new[np.asarray(decisions.expert_index)[real]])
            np.testing.assert_array_equal(renamed.slot, decisions.slot)
            np.testing.assert_allclose(renamed.gate, decisions.gate, rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(renamed_stats.expert_load.total)[new], stats.expert_load.total)
        for field in ("fraction_tokens_dropped", "router_entropy", "expert_usage", "load_balancing_loss"):
            np.testing.assert_allclose(getattr(renamed_stats, field).total, getattr(stats, field).total, rtol=1e-4,
                                       atol=1e-5)

    check()


@pytest.mark.parametrize("name, semantics", [
    *((name, "switch_tf") for name in ROUTERS),
    *((name, semantics) for name in ("switch", "top2, all") for semantics in ("mtf", "t5x"))])
def test_statistics_of_parts_merge_to_those_of_the_whole(name, semantics):
    rng = np.random.RandomState(0)
    router = Router(4, **{"exploration": "input_jitter", "jitter_noise": 0.3, "semantics": semantics, **ROUTERS[name],
                          "second_place_loss_weight": 0.5 * (num_choices(name) > 1)}, name="router")
    built(router, D_MODEL)
    inputs, is_real = rng.randn(4, 7, D_MODEL).astype("float32"), rng.rand(4, 7) < 0.7
    token_ids = rng.randint(0, 100, (4, 7)).astype("int32")

    def stats_of(rows):
        return router(inputs[rows], padding_mask=is_real[rows], expert_capacity=2, token_ids=token_ids[rows],
                      training=True)[1]

    with random.random_seed(3):
        whole = stats_of(slice(None))
        first, second = in_parts(2, lambda index: stats_of(slice(2 * index, 2 * index + 2)))
    merged = first.merge(second)
    for field, mine, theirs in zip(whole._fields, merged, whole, strict=True):
        np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-5, atol=1e-6, err_msg=field)
        np.testing.assert_allclose(mine.weight, theirs.weight, err_msg=field)


@settings(max_examples=24, deadline=None)
@given(batches(is_finite=True))
def test_both_dispatches_move_the_same_rows_and_a_round_trip_is_the_gate_times_the_token(batch):
    decisions, _ = route("switch", batch)
    carriers = [dispatch.create(decisions, way) for way in ("einsum", "index")]
    buffers = [np.asarray(carrier.dispatch(batch.inputs)) for carrier in carriers]
    np.testing.assert_array_equal(*buffers)
    for carrier in carriers:
        np.testing.assert_allclose(carrier.combine(buffers[0]), batch.inputs * np.asarray(decisions.gate), rtol=1e-6)
