"""Selective precision (section 2.4): in a bfloat16 model the router decides as a float32 model does."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import Router
from switch_tf.ops import random
from tests.layers.switch_layers import ROUTERS, built

NUM_EXPERTS, D_MODEL = 8, 32


def choices(name, inputs, dtype, router_dtype):
    """Experts of each token (tokens of each expert, where they choose) and their slots, for 4 groups of 256 tokens."""
    router = Router(NUM_EXPERTS, dtype=dtype, router_dtype=router_dtype, name="router", **ROUTERS[name])
    built(router, D_MODEL, (1 + np.random.RandomState(0).randn(D_MODEL, NUM_EXPERTS)) / 2)
    with random.random_seed(0):
        decisions, _ = router(inputs, expert_capacity=40, training=True)
    assert decisions.gate.dtype == tf.float32
    return [np.asarray(part) for part in decisions[:-1]]


@pytest.mark.parametrize("name", [
    "switch", "switch, sampled", "ntlb", "batch_prioritized, 2", "top2, random", "top_n, 3", "expert_choice",
    "sinkhorn"])
def test_a_float32_router_chooses_in_bfloat16_as_in_float32_and_a_bfloat16_router_does_not(name):
    # Logits around 32 / 2 = 16, where neighbours in bfloat16 are 1/16 or 1/8 apart.
    inputs = tf.cast(1 + np.random.RandomState(1).randn(4, 256, D_MODEL), tf.bfloat16)
    expected = choices(name, tf.cast(inputs, tf.float32), "float32", "float32")
    selective = choices(name, inputs, "mixed_bfloat16", "float32")
    for mine, theirs in zip(selective, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    everything = choices(name, inputs, "mixed_bfloat16", "bfloat16")
    share = np.mean(everything[0] != expected[0])
    print(f"{name}: an all-bfloat16 router decides otherwise in {share:.1%} of its choices")
    assert share > 0.005
