"""All dispatches agree under every policy, in outputs and in every gradient, eagerly and compiled.

With padding, overflow, jitter, expert dropout, two groups, and the balance losses on top.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.ops import random
from tests.layers.switch_layers import ROUTERS, built, dispatches, in_parts

NUM_EXPERTS, D_MODEL, D_FF = 4, 5, 6
# Sums in different orders: a few units of float32's last place, 6e-8, of the largest number in each tensor.
TOLERANCE = 1e-6


def make_layer(name, dispatch, **kwargs):
    router = Router(NUM_EXPERTS, **{"exploration": "input_jitter", "jitter_noise": 0.2, **ROUTERS[name]},
                    name="router")
    layer = SwitchFeedForward(NUM_EXPERTS, D_FF, "geglu", train_capacity_factor=0.9, min_expert_capacity=1,
                              expert_dropout_rate=0.3, dispatch=dispatch, router=router, name="layer", **kwargs)
    return built(layer, D_MODEL, scale=0.5)


@functools.cache
def run(name, dispatch, is_compiled):
    """Outputs, and gradients with respect to the inputs and every weight, by name."""
    # 9 tokens for each group, 9 * 0.9 / 4 = 2 slots for each expert
    layer, rng = make_layer(name, dispatch, group_size=9), np.random.RandomState(1)
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
    # Six different tokens, over and over, and experts 1 and 3 alike.
    rng = np.random.RandomState(0)
    router = built(Router(NUM_EXPERTS, exploration="argmax", **ROUTERS[name]), D_MODEL,
                   rng.randn(D_MODEL, NUM_EXPERTS)[:, [0, 1, 2, 1]])
    inputs = rng.randn(6, D_MODEL).astype("float32")[rng.randint(0, 6, (4, 40))]
    is_real = rng.rand(4, 40) < 0.8

    def decide(inputs):
        return router(inputs, padding_mask=is_real, expert_capacity=8)[0]

    for mine, theirs in zip(tf.function(decide, jit_compile=True, autograph=False)(tf.constant(inputs)), decide(inputs),
                            strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


# Each policy and each dispatch, which know nothing of each other.
@pytest.mark.parametrize("name, dispatch", [
    ("switch", "index"), ("top2, random", "einsum"), ("top2, random", "ragged"), ("hash", "index")])
def test_parts_of_a_batch_give_outputs_and_statistics_of_the_whole_with_dropout_and_jitter(name, dispatch):
    layer, rng = make_layer(name, dispatch, num_groups_multiple=4), np.random.RandomState(0)
    inputs, is_real = rng.randn(4, 8, D_MODEL).astype("float32"), rng.rand(4, 8) < 0.8
    token_ids = rng.randint(0, 50, (4, 8)).astype("int32")

    def forward(rows):
        return layer.forward(inputs[rows], padding_mask=is_real[rows], token_ids=token_ids[rows], training=True)

    with random.random_seed(1):
        whole, stats = forward(slice(None))
        parts = in_parts(2, lambda index: forward(slice(2 * index, 2 * index + 2)))
    np.testing.assert_allclose(np.concatenate([outputs for outputs, _ in parts]), whole, rtol=1e-6, atol=1e-6)
    merged = functools.reduce(lambda one, more: one.merge(more), [part for _, part in parts])
    for field, mine, theirs in zip(stats._fields, merged, stats, strict=True):
        np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-5, err_msg=field)
        np.testing.assert_allclose(mine.weight, theirs.weight, err_msg=field)
