"""Switch layers, their inputs, and a router of every kind, for tests."""

import numpy as np
import pytest

from switch_tf import partitioning
from switch_tf.layers import ExpertFeedForward, SwitchFeedForward, SwitchSelfAttention

D_MODEL, D_FF = 4, 6
# Named by the policy and by what else there is to say.
ROUTERS = {name: {"policy": name.partition(",")[0], **options} for name, options in {
    "switch": {}, "switch, sampled": {"exploration": "sample"}, "ntlb": {}, "batch_prioritized, 1": {},
    "batch_prioritized, 2": {"num_selected_experts": 2},
    "top2, all": {"second_expert_policy": "all"}, "top2, none": {"second_expert_policy": "none"},
    "top2, threshold": {"second_expert_policy": "threshold", "second_expert_threshold": 0.4},
    "top2, random": {"second_expert_policy": "random", "second_expert_threshold": 0.6},
    "top_n, 3": {"num_selected_experts": 3, "second_expert_policy": "all"},
    "expert_choice": {}, "hash": {}, "sinkhorn": {}}.items()}


def kinds_first(names, kinds):
    """Marks as slow the routers that are not of `kinds`, for tests that take time with each."""
    return [name if name in kinds else pytest.param(name, marks=pytest.mark.slow) for name in names]


def dispatches(name):
    return ("einsum", "index") if name == "expert_choice" else ("einsum", "index", "ragged")


def built(layer, width, *values, seed=0, scale=1.0):
    """The layer for inputs of a width, its weights these values, spread over their shapes, or random numbers."""
    layer.build((None,) * (3 if isinstance(layer, ExpertFeedForward) else 2) + (width,))
    rng = np.random.RandomState(seed)
    for weight, value in zip(layer.weights, values or layer.weights, strict=True):
        weight.assign(np.broadcast_to(value, weight.shape) if values else scale * rng.randn(*weight.shape))
    return layer


def make_layer(num_experts=3, seed=0, d_model=D_MODEL, **kwargs):
    """A layer with random weights large enough that routes and outputs differ clearly."""
    layer = SwitchFeedForward(num_experts, **{"d_ff": D_FF, "min_expert_capacity": 1, **kwargs})
    return built(layer, d_model, seed=seed)


def switch_attention(num_experts=3, num_heads=2, d_kv=3, dtype="float32", dropout_rate=0.0, **kwargs):
    """An attention layer that is not built; the keyword arguments go to both layers of experts."""
    kwargs = {"d_ff": 5, "min_expert_capacity": 1, **kwargs, "output_dim": num_heads * d_kv}
    experts = (SwitchFeedForward(num_experts, **kwargs, name=name) for name in ("query_experts", "key_value_experts"))
    return SwitchSelfAttention(*experts, num_heads, d_kv, dropout_rate, dtype=dtype)


def make_attention(num_experts=3, **kwargs):
    return built(switch_attention(num_experts, **kwargs), D_MODEL, scale=0.8)


def make_inputs(batch=2, length=6, seed=1, share_real=0.7):
    rng = np.random.RandomState(seed)
    return rng.randn(batch, length, D_MODEL).astype("float32"), rng.rand(batch, length) < share_real


def in_parts(count, function):
    """The results of a function of their numbers for the parts of a batch."""
    results = []
    for index in range(count):
        with partitioning.part_of_batch(count, index):
            results.append(function(index))
    return results
