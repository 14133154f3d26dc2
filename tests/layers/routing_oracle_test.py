"""Router and Switch layer against an oracle that goes through groups, choices and tokens one by one, in float64."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.ops import random
from tests.layers.switch_layers import built

D_MODEL, D_FF = 6, 5
SEED = 7


# The oracle.


class Group(NamedTuple):
    """What is known of one group; `logits`, `token_ids` and `uniforms` are lists of one entry for each token."""

    logits: list
    token_ids: list
    is_real: list
    uniforms: list
    capacity: int


class Slots:
    """The slots of each expert for one group."""

    def __init__(self, num_experts, capacity):
        self.num_taken = [0] * num_experts
        self.capacity = capacity

    def take(self, expert):
        """The next slot of the expert, or the capacity where all are taken."""
        slot = self.num_taken[expert]
        self.num_taken[expert] += slot < self.capacity
        return slot


def softmax(row):
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def ranked(row):
    """Experts from best to worst; of equal ones the lowest first."""
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))


def balanced(group):
    """Rows scaled to sum 1 and columns to equal sums, in turn, as often as the policy does it."""
    weights = [[math.exp(value) for value in row] for row in group.logits]
    real = [token for token, is_real in enumerate(group.is_real) if is_real]
    price = [1.0] * len(weights[0])
    for _ in range(20 if real else 0):
        columns = [0.0] * len(price)
        for token in real:
            priced = [weight * factor for weight, factor in zip(weights[token], price, strict=True)]
            for expert, value in enumerate(priced):
                columns[expert] += value / sum(priced)
        price = [factor / column for factor, column in zip(price, columns, strict=True)]
    return [[weight * factor for weight, factor in zip(row, price, strict=True)] for row in weights]


def is_carried_out(gate, uniform, rule, threshold, training):
    """Whether a later choice of normalised gate `gate` is."""
    if rule == "threshold":
        return gate > threshold
    if rule == "random" and training:
        return uniform < min(1.0, gate / threshold)
    return rule != "none"


def queued(group, num_experts, num_choices, preferences, order=None, rule="all", threshold=0.2, training=False,
           is_normalized=True):
    """Top choices in queues, all first choices before all second ones: [(expert, slot, gate), ...] of each token."""
    num_tokens = len(group.is_real)
    decisions = [[None] * num_choices for _ in range(num_tokens)]
    slots = Slots(num_experts, group.capacity)
    for choice in range(num_choices):
        for token in order or range(num_tokens):
            probs, chosen = softmax(group.logits[token]), ranked(preferences[token])[:num_choices]
            gate = probs[chosen[choice]]
            if num_choices > 1 and is_normalized:
                gate /= sum(probs[expert] for expert in chosen)
            slot = group.capacity
            if group.is_real[token] and (choice == 0 or is_carried_out(
                    gate, group.uniforms[token][choice - 1], rule, threshold, training)):
                slot = slots.take(chosen[choice])
            decisions[token][choice] = (chosen[choice], slot, gate if slot < group.capacity else 0.0)
    return decisions


def no_token_left_behind(group, num_experts):
    decisions = [[(0, group.capacity, 0.0)] for _ in group.is_real]
    slots, waiting = Slots(num_experts, group.capacity), [t for t, is_real in enumerate(group.is_real) if is_real]
    for attempt in range(min(4, num_experts)):
        for token in list(waiting):
            expert = ranked(group.logits[token])[attempt]
            slot = slots.take(expert)
            decisions[token] = [(expert, slot, 0.0)]
            if slot < group.capacity:
                decisions[token] = [(expert, slot, softmax(group.logits[token])[expert])]
                waiting.remove(token)
    return decisions


def hashed(group, num_experts):
    decisions, slots = [], Slots(num_experts, group.capacity)
    for token_id, is_real in zip(group.token_ids, group.is_real, strict=True):
        slot = slots.take(token_id % num_experts) if is_real else group.capacity
        decisions.append([(token_id % num_experts, slot, float(slot < group.capacity))])
    return decisions


def taken_by_experts(group, num_experts):
    """[(token, gate), ...] of each expert's slots; (number of tokens, 0) where one is empty."""
    num_tokens, decisions = len(group.is_real), []
    for expert in range(num_experts):
        gates = {token: softmax(group.logits[token])[expert] for token in range(num_tokens) if group.is_real[token]}
        best = sorted(gates, key=lambda token, gates=gates: (-gates[token], token))[:group.capacity]
        num_empty = min(group.capacity, num_tokens) - len(best)
        decisions.append([(token, gates[token]) for token in best] + [(num_tokens, 0.0)] * num_empty)
    return decisions


def decide(group, num_experts, policy, num_selected_experts=None, second_expert_policy="random",
           second_expert_threshold=0.2, semantics="switch_tf", training=False):
    """What a policy decides for one group."""
    num_choices = num_selected_experts or (2 if policy == "top2" else 1)
    if policy == "ntlb":
        return no_token_left_behind(group, num_experts)
    if policy == "hash":
        return hashed(group, num_experts)
    if policy == "expert_choice":
        return taken_by_experts(group, num_experts)
    preferences = balanced(group) if policy == "sinkhorn" and training else group.logits
    order, rule = None, "all"
    if policy == "batch_prioritized":
        order = sorted(range(len(group.is_real)), key=lambda token: (-max(softmax(group.logits[token])), token))
    if policy in ("top2", "top_n"):
        rule = second_expert_policy
    return queued(group, num_experts, num_choices, preferences, order, rule, second_expert_threshold, training,
                  is_normalized=semantics != "t5x")


def apply_expert(token, expert, input_kernels, wo):
    products = [token @ kernel[expert] for kernel in input_kernels]
    hidden = np.maximum(products[0], 0.0)
    if len(products) == 2:
        x = products[0]
        hidden = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * products[1]
    return hidden @ wo[expert]


def layer_outputs(tokens, decisions, policy, weights):
    """Outputs of one group of tokens, and which of them an expert took."""
    outputs, is_served = np.zeros(tokens.shape), np.zeros(len(tokens), bool)
    if policy == "expert_choice":
        jobs = [(token, expert, gate) for expert, slots in enumerate(decisions) for token, gate in slots
                if token < len(tokens)]
    else:
        jobs = [(token, expert, gate) for token, choices in enumerate(decisions) for expert, _, gate in choices if gate]
    for token, expert, gate in jobs:
        outputs[token] += gate * apply_expert(tokens[token], expert, *weights)
        is_served[token] = True
    return outputs, is_served


# What is compared.


class Batch(NamedTuple):
    """Sizes of a random batch; `capacity` is that of each expert and group."""

    sequences: int
    length: int
    groups: int
    experts: int
    capacity: int
    share_real: float
    activation: str


BATCHES = [
    Batch(2, 9, 1, 4, 2, 0.8, "relu"), Batch(4, 6, 3, 5, 2, 0.6, "geglu"), Batch(2, 6, 2, 4, 6, 1.0, "relu")]
# T5X has as many groups as experts, or a multiple.
T5X_BATCHES = [Batch(2, 9, 3, 3, 3, 0.8, "relu"), Batch(4, 6, 4, 4, 2, 0.6, "geglu"), Batch(3, 6, 3, 3, 6, 1.0, "relu")]
CASES = {
    "switch": {"policy": "switch"},
    "ntlb": {"policy": "ntlb"},
    **{f"batch_prioritized, {k}": {"policy": "batch_prioritized", "num_selected_experts": k} for k in (1, 2, 3)},
    **{f"top2, {rule}": {"policy": "top2", "second_expert_policy": rule, "second_expert_threshold": 0.45}
       for rule in ("all", "none", "threshold", "random")},
    "top2, random in training": {"policy": "top2", "second_expert_threshold": 0.6, "training": True},
    "top2 of T5X": {"policy": "top2", "second_expert_policy": "all", "semantics": "t5x"},
    "top_n, 2": {"policy": "top_n", "num_selected_experts": 2, "second_expert_policy": "all"},
    "top_n, 3": {"policy": "top_n", "num_selected_experts": 3, "second_expert_policy": "all"},
    "top_n, 3, random in training": {"policy": "top_n", "num_selected_experts": 3, "second_expert_threshold": 0.5,
                                     "training": True},
    "expert_choice": {"policy": "expert_choice"},
    "hash": {"policy": "hash"},
    "sinkhorn": {"policy": "sinkhorn"},
    "sinkhorn in training": {"policy": "sinkhorn", "training": True},
}


def make_layer(batch, dispatch, policy, training=False, semantics="switch_tf", **router):
    tokens = batch.sequences * batch.length // batch.groups
    # A quarter of a slot more than `capacity` is rounded to it.
    factor = (batch.capacity + 0.25) * batch.experts / tokens
    layer = SwitchFeedForward(
        batch.experts, D_FF, batch.activation, num_groups_multiple=batch.groups, train_capacity_factor=factor,
        eval_capacity_factor=factor, min_expert_capacity=1, semantics=semantics, dispatch=dispatch, name="layer",
        router=Router(batch.experts, policy=policy, exploration="argmax", semantics=semantics, name="router", **router))
    return built(layer, D_MODEL, scale=0.5)


def make_inputs(batch, seed):
    rng = np.random.RandomState(seed)
    shape = (batch.sequences, batch.length)
    return (rng.randn(*shape, D_MODEL).astype("float32"), rng.rand(*shape) < batch.share_real,
            rng.randint(0, 50, shape).astype("int32"))


def by_oracle(layer, batch, inputs, is_real, token_ids, case, weights=None):
    """`(decisions, outputs, is_served)` of each group; `weights` are the layer's unless given, in float64."""
    tokens = np.float64(inputs).reshape(batch.groups, -1, D_MODEL)
    size = tokens.shape[1]
    with random.random_seed(SEED):
        seed = random.layer_seed(layer.router, "second_expert")
        num_later = (case.get("num_selected_experts") or 2) - 1
        uniforms = np.asarray(random.uniform(seed, (batch.groups, size, num_later)))
    weights = list(weights or map(np.float64, layer.weights))
    kernel = None if case["policy"] == "hash" else weights.pop(0)
    *input_kernels, wo = weights
    results = []
    for g in range(batch.groups):
        logits = None if kernel is None else [[float(token @ kernel[:, e]) for e in range(batch.experts)]
                                              for token in tokens[g]]
        group = Group(logits, token_ids.reshape(batch.groups, size)[g].tolist(),
                      is_real.reshape(batch.groups, size)[g].tolist(), uniforms[g].tolist(), batch.capacity)
        decisions = decide(group, batch.experts, **case)
        results.append((decisions, *layer_outputs(tokens[g], decisions, case["policy"], (input_kernels, wo))))
    return results


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", CASES)
def test_decisions_outputs_and_drops_are_the_oracles(name, number):
    batch = (T5X_BATCHES if CASES[name].get("semantics") == "t5x" else BATCHES)[number]
    case, policy = CASES[name], CASES[name]["policy"]
    inputs, is_real, token_ids = make_inputs(batch, seed=batch.length)
    given = inputs, is_real
    if case.get("semantics") == "t5x":
        # T5X zeroes padding and routes it.
        inputs, is_real = inputs * is_real[..., None], np.ones_like(is_real)
    training = case.get("training", False)
    ways = ("einsum", "index", "ragged")[:2 if policy == "expert_choice" else 3] if batch.groups == 3 else ("index",)
    layers = {dispatch: make_layer(batch, dispatch, **case) for dispatch in ways}
    layer = layers["index"]
    expected = by_oracle(layer, batch, inputs, is_real, token_ids, case)

    def in_groups(x):
        return x.reshape(batch.groups, -1, *x.shape[2:])

    with random.random_seed(SEED):
        decisions, _ = layer.router(in_groups(inputs), padding_mask=in_groups(is_real), expert_capacity=batch.capacity,
                                    token_ids=in_groups(token_ids), training=training)
    if policy == "expert_choice":
        np.testing.assert_array_equal(
            decisions.token_index, [[[token for token, _ in slots] for slots in group] for group, _, _ in expected])
        gates = [[[gate for _, gate in slots] for slots in group] for group, _, _ in expected]
    else:
        triples = np.array([group for group, _, _ in expected])
        is_compared = in_groups(is_real)
        np.testing.assert_array_equal(np.asarray(decisions.expert_index)[is_compared], triples[..., 0][is_compared])
        np.testing.assert_array_equal(decisions.slot, triples[..., 1])
        gates = triples[..., 2]
    np.testing.assert_allclose(decisions.gate, gates, rtol=1e-5, atol=1e-6)

    outputs = np.concatenate([group for _, group, _ in expected]).reshape(inputs.shape)
    is_served = np.concatenate([served for _, _, served in expected]).reshape(is_real.shape)
    assert np.abs(outputs).max() > 0.5
    if batch.length == 9:  # 8 slots for 18 tokens
        assert (is_real & ~is_served).any() and not given[1].all()
    for dispatch, one in layers.items():
        with random.random_seed(SEED):
            mine, stats = one.forward(given[0], padding_mask=given[1], token_ids=token_ids, training=training)
        np.testing.assert_allclose(mine, outputs, rtol=1e-5, atol=1e-5, err_msg=dispatch)
        np.testing.assert_array_equal(np.asarray(mine)[~is_served], 0, err_msg=dispatch)
        assert stats.fraction_tokens_dropped == ((is_real & ~is_served).sum(), is_real.sum())


@pytest.mark.parametrize("name", [name for name in CASES if name != "top2 of T5X"])
def test_gradients_are_the_oracles_differences(name):
    """Along a random direction of inputs and weights, too short a step to change a decision."""
    case, batch, step = CASES[name], BATCHES[1], 1e-6
    inputs, is_real, token_ids = make_inputs(batch, seed=batch.length)
    layer, rng = make_layer(batch, "index", **case), np.random.RandomState(5)
    target, x = rng.randn(*inputs.shape), tf.constant(inputs)
    with random.random_seed(SEED), tf.GradientTape() as tape:
        tape.watch(x)
        outputs, _ = layer.forward(x, padding_mask=is_real, token_ids=token_ids, training=case.get("training", False))
        total = tf.reduce_sum(outputs * tf.constant(target, tf.float32))
    gradients = tape.gradient(total, [x, *(weight.value for weight in layer.weights)])

    points = [np.float64(inputs), *map(np.float64, layer.weights)]
    for moved, gradient in enumerate(gradients):
        direction, sums = rng.randn(*points[moved].shape), []
        for sign in (-1, 1):
            x, *weights = [point + sign * step * direction if i == moved else point for i, point in enumerate(points)]
            groups = by_oracle(layer, batch, x, is_real, token_ids, case, weights)
            sums.append((np.concatenate([group for _, group, _ in groups]).reshape(inputs.shape) * target).sum())
        assert np.abs(gradient).max() > 0.1
        np.testing.assert_allclose(
            np.sum(np.float64(gradient) * direction), (sums[1] - sums[0]) / (2 * step), rtol=1e-4, atol=1e-4)
