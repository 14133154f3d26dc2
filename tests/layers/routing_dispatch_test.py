"""All dispatches agree under every policy, in outputs and in every gradient, eagerly and compiled.

With padding, overflow, jitter, expert dropout, two groups, and the balance losses on top.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.ops import random

NUM_EXPERTS, D_MODEL, D_FF = 4, 5, 6
ROUTERS = {
    "switch": {"policy": "switch"},
    "switch, sampled": {"policy": "switch", "exploration": "sample"},
    "ntlb": {"policy": "ntlb"},
    "batch_prioritized, 1": {"policy": "batch_prioritized"},
    "batch_prioritized, 2": {"policy": "batch_prioritized", "num_selected_experts": 2},
    "top2, all": {"policy": "top2", "second_expert_policy": "all"},
    "top2, none": {"policy": "top2", "second_expert_policy": "none"},
    "top2, threshold": {"policy": "top2", "second_expert_policy": "threshold", "second_expert_threshold": 0.3},
    "top2, random": {"policy": "top2", "second_expert_policy": "random", "second_expert_threshold": 0.6},
    "top_n, 3": {"policy": "top_n", "num_selected_experts": 3, "second_expert_policy": "all"},
    "expert_choice": {"policy": "expert_choice"},
    "hash": {"policy": "hash"},
    "sinkhorn": {"policy": "sinkhorn"},
}
# Sums in different orders: a few units of float32's last place, 6e-8, of the largest number in each tensor.
TOLERANCE = 1e-6


@functools.cache
def run(name, dispatch, is_compiled):
    """Outputs, and gradients with respect to the inputs and every weight, by name."""
    router = Router(NUM_EXPERTS, **{"exploration": "input_jitter", "jitter_noise": 0.2, **ROUTERS[name]}, name="router")
    # 9 tokens for each group, 9 * 0.9 / 4 = 2 slots for each expert
    layer = SwitchFeedForward(NUM_EXPERTS, D_FF, "geglu", group_size=9, train_capacity_factor=0.9,
                              min_expert_capacity=1, expert_dropout_rate=0.3, dispatch=dispatch, router=router,
                              name="layer")
    layer.build((None, None, D_MODEL))
    rng = np.random.RandomState(0)
    for weight in layer.weights:
        weight.assign(rng.randn(*weight.shape) / 2)
    inputs, is_real = rng.randn(3, 6, D_MODEL).astype("float32"), rng.rand(3, 6) < 0.9
    token_ids, target = rng.randint(0, 50, (3, 6)).astype("int32"), rng.randn(3, 6, D_MODEL).astype("float32")
    weights = {weight.path: weight.value for weight in layer.weights}

    def gradients(inputs):
        with random.random_seed(1), tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs, stats = layer.forward(inputs, padding_mask=is_real, token_ids=token_ids, training=True)
            loss = tf.reduce_sum(outputs * target) + stats.load_balancing_loss.value + stats.router_z_loss.value
            return outputs, stats.fraction_tokens_dropped.total, tape.gradient(loss, [inputs, *weights.values()])

    compute = tf.function(gradients, autograph=False) if is_compiled else gradients
    outputs, num_dropped, found = compute(tf.constant(inputs))
    assert not is_real.all() and (num_dropped > 0 or name == "ntlb")
    return {"outputs": outputs, **dict(zip(("inputs", *weights), found, strict=True))}


def dispatches(name):
    return ("einsum", "index") if name == "expert_choice" else ("einsum", "index", "ragged")


def check_same(mine, theirs, message):
    for key, expected in theirs.items():
        largest = np.abs(expected).max()
        assert largest > 0.1, key
        np.testing.assert_allclose(mine[key], expected, rtol=0, atol=TOLERANCE * max(largest, 1),
                                   err_msg=f"{message}: {key}")


@pytest.mark.parametrize("name", ROUTERS)
def test_outputs_and_gradients_agree(name):
    expected = run(name, "einsum", is_compiled=False)
    assert len(expected) == 2 + (name != "hash") + 3
    for dispatch in dispatches(name)[1:]:
        check_same(run(name, dispatch, is_compiled=False), expected, dispatch)


# Every policy, and every dispatch of the two kinds of decisions.
@pytest.mark.parametrize("name, dispatch", [
    ("top_n, 3", "index"), ("expert_choice", "index"),
    *(pytest.param(name, dispatch, marks=pytest.mark.slow) for name, dispatch in (
        *((name, "index") for name in ("switch", "ntlb", "batch_prioritized, 2", "top2, random", "hash", "sinkhorn")),
        ("top_n, 3", "einsum"), ("top_n, 3", "ragged"), ("expert_choice", "einsum")))])
def test_compiled_they_give_what_einsum_gives_eagerly(name, dispatch):
    check_same(run(name, dispatch, is_compiled=True), run(name, "einsum", is_compiled=False), dispatch)


@pytest.mark.parametrize("name", ["ntlb", "expert_choice", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("switch", "batch_prioritized, 2", "top_n, 3"))])
def test_xla_decides_ties_the_same_way(name):
    router = Router(NUM_EXPERTS, exploration="argmax", **ROUTERS[name])
    router.build((None, None, D_MODEL))
    # Six different tokens, over and over, and experts 1 and 3 alike.
    rng = np.random.RandomState(0)
    router.kernel.assign(rng.randn(D_MODEL, NUM_EXPERTS)[:, [0, 1, 2, 1]])
    inputs = rng.randn(6, D_MODEL).astype("float32")[rng.randint(0, 6, (4, 40))]
    is_real = rng.rand(4, 40) < 0.8

    def decide(inputs):
        return router(inputs, padding_mask=is_real, expert_capacity=8)[0]

    for mine, theirs in zip(tf.function(decide, jit_compile=True, autograph=False)(tf.constant(inputs)), decide(inputs),
                            strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["switch", "top2, random", "hash"])
@pytest.mark.parametrize("dispatch", ["einsum", "index", "ragged"])
def test_parts_of_a_batch_give_the_outputs_of_the_whole_with_dropout_and_jitter(name, dispatch):
    router = Router(NUM_EXPERTS, jitter_noise=0.2, **ROUTERS[name], name="router")
    layer = SwitchFeedForward(NUM_EXPERTS, D_FF, num_groups_multiple=4, train_capacity_factor=0.9,
                              min_expert_capacity=1, expert_dropout_rate=0.3, dispatch=dispatch, router=router,
                              name="layer")
    layer.build((None, None, D_MODEL))
    rng = np.random.RandomState(0)
    for weight in layer.weights:
        weight.assign(rng.randn(*weight.shape))
    inputs, token_ids = rng.randn(4, 8, D_MODEL).astype("float32"), rng.randint(0, 50, (4, 8)).astype("int32")
    with random.random_seed(1):
        whole, _ = layer.forward(inputs, token_ids=token_ids, training=True)
        parts = []
        for index in range(2):
            rows = slice(2 * index, 2 * index + 2)
            with partitioning.part_of_batch(2, index):
                parts.append(layer.forward(inputs[rows], token_ids=token_ids[rows], training=True)[0])
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
