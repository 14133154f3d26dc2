"""Metrics as (total, weight) pairs, which merge exactly over microbatches, replicas and steps and are divided once."""

from typing import Any, NamedTuple

import numpy as np
from keras import ops


class Mean(NamedTuple):
    """A mean that is still a sum: `total` (any shape) over `weight` (scalar), both float32 or NumPy float64."""

    total: Any
    weight: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self):
        """total / weight, and 0 where nothing was counted (a batch of nothing but padding)."""
        return ops.divide_no_nan(self.total, self.weight)


class RouterStats(NamedTuple):
    """What one sparse layer's router did, over real tokens only.

    `expert_load`: share of the tokens whose first choice is each expert, before capacity, [num_experts]; where experts
        choose, share of what they took.
    `fraction_tokens_dropped`: share of the tokens that no expert took.
    `router_entropy`: entropy of the router's probabilities, in nats.
    `router_confidence`: the largest probability.
    `expert_usage`: share of the experts' slots that hold a token.
    `load_balancing_loss`, `router_z_loss`: the paper's equation 4 and ST-MoE's z-loss, without their weights.
    """

    expert_load: Mean
    fraction_tokens_dropped: Mean
    router_entropy: Mean
    router_confidence: Mean
    expert_usage: Mean
    load_balancing_loss: Mean
    router_z_loss: Mean

    @property
    def dead_experts(self):
        """How many experts nothing wanted to go to, of all that was merged: <int32> scalar."""
        return ops.sum(ops.cast(ops.equal(self.expert_load.total, 0), "int32"))

    def merge(self, other: "RouterStats") -> "RouterStats":
        return RouterStats(*(mine.merge(theirs) for mine, theirs in zip(self, other, strict=True)))


def merge(first: dict, second: dict) -> dict:
    """Merges two dictionaries of metric name -> Mean; names in only one of them are kept."""
    merged = {name: first[name].merge(second[name]) for name in first.keys() & second.keys()}
    return {name: merged.get(name, first.get(name, second.get(name))) for name in {**first, **second}}


def to_host(means: dict) -> dict:
    """Copies a dictionary of Means off the device, as float64."""
    return {name: Mean(np.asarray(mean.total, np.float64), np.asarray(mean.weight, np.float64))
            for name, mean in means.items()}
