"""Metrics as (total, weight) pairs, which merge exactly over microbatches, replicas and steps and are divided once."""

from typing import Any, NamedTuple

import keras
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
        return merge(self, other)


class Measurements(NamedTuple):
    """What is measured on a batch: a tree of Means, merged and divided as one.

    `loss_terms`: name -> Mean over targets; what an objective adds up, in nats per target, coefficients included.
    `accuracy`: share of the targets that have the largest logit.
    `routers`: sparse layer -> RouterStats, in the order of `config.sparse_layer_names`.
    """

    loss_terms: dict[str, Mean]
    accuracy: Mean
    routers: dict[str, RouterStats]


class StepMeasurements(NamedTuple):
    """What is measured in a training step: its batch, and means over steps.

    `tokens`: real tokens of a batch, inputs and targets; `gradient_norm`: before clipping; `loss`: what a step
        minimises, as it computed it.
    """

    batch: Measurements
    tokens: Mean
    gradient_norm: Mean
    loss: Mean


def merge(first, second):
    """Adds up two trees of Means of the same structure; nothing (None) and a tree are that tree."""
    if first is None:
        return second
    return keras.tree.map_structure(lambda mine, theirs: mine + theirs, first, second)


def to_host(measured):
    """Copies a tree of Means off the device, as float64: sums over many steps outgrow float32."""
    return keras.tree.map_structure(lambda number: np.asarray(number, np.float64), measured)


def to_json(measured):
    """A tree of Means on the host as lists and dictionaries; float64 survives JSON exactly."""
    if isinstance(measured, Mean):
        return [measured.total.tolist(), measured.weight.tolist()]
    entries = measured if isinstance(measured, dict) else measured._asdict()
    return {name: to_json(entry) for name, entry in entries.items()}


def from_json(saved: dict) -> StepMeasurements:
    """The reverse of `to_json`."""

    def mean(entry):
        return Mean(*(np.asarray(number, np.float64) for number in entry))

    batch = saved["batch"]
    return StepMeasurements(
        Measurements({name: mean(entry) for name, entry in batch["loss_terms"].items()}, mean(batch["accuracy"]),
                     {layer: RouterStats(**{name: mean(entry) for name, entry in stats.items()})
                      for layer, stats in batch["routers"].items()}),
        *(mean(saved[name]) for name in ("tokens", "gradient_norm", "loss")))
