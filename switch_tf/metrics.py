"""Metrics as (total, weight) pairs, merged exactly over microbatches, replicas and steps, and divided once."""

import operator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from switch_tf.partitioning.tensors import Tensor


class Mean(NamedTuple):
    """A mean before division: `total` (any shape) over `weight` (scalar), float32 or NumPy float64."""

    total: Any
    weight: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> Tensor:
        """total / weight; 0 if the weight is 0."""
        return ops.divide_no_nan(self.total, self.weight)


class RouterStats(NamedTuple):
    """Statistics of one router over real tokens.

    Attributes:
        expert_load: [num_experts], share of the tokens that choose each expert first, before capacity; with expert
            choice, of the tokens taken.
        fraction_tokens_dropped: Share of the tokens that no expert took.
        router_entropy: Entropy of the router's probabilities, in nats.
        router_confidence: Largest probability.
        expert_usage: Share of slots that hold a token.
        load_balancing_loss: Equation 4 of the paper, without its weight.
        router_z_loss: ST-MoE's z-loss, without its weight.
    """

    expert_load: Mean
    fraction_tokens_dropped: Mean
    router_entropy: Mean
    router_confidence: Mean
    expert_usage: Mean
    load_balancing_loss: Mean
    router_z_loss: Mean

    @property
    def dead_experts(self) -> Tensor:
        """Number of experts that no token chose first, <int32> scalar."""
        return ops.sum(ops.cast(ops.equal(self.expert_load.total, 0), "int32"))

    def merge(self, other: "RouterStats") -> "RouterStats":
        return merge(self, other)


class Measurements(NamedTuple):
    """Metrics of a batch: a tree of Means, merged and divided together.

    Attributes:
        loss_terms: Weighted terms of the objective by name, over targets in nats.
        accuracy: Share of the targets with the largest logit.
        routers: By sparse layer, in the order of `config.sparse_layer_names`.
    """

    loss_terms: dict[str, Mean]
    accuracy: Mean
    routers: dict[str, RouterStats]


class StepMeasurements(NamedTuple):
    """Metrics of a training step: its batch's, and means over steps.

    Attributes:
        tokens: Real tokens of a batch, inputs and targets together.
        gradient_norm: Global norm, before clipping.
        loss: The minimised loss.
    """

    batch: Measurements
    tokens: Mean
    gradient_norm: Mean
    loss: Mean


def merge(first: Any, second: Any) -> Any:
    """Adds two trees of Means of the same structure. The first may be None."""
    if first is None:
        return second
    return keras.tree.map_structure(operator.add, first, second)


class Vector:
    """All results of a compiled function as one vector, because each array that is fetched takes the host some time."""

    def join(self, numbers: Any) -> Tensor:
        """Returns a nest of numbers as a vector, in a traced function. Each trace has the same shapes."""
        self._like = keras.tree.map_structure(lambda number: np.empty(number.shape), numbers)
        return ops.concatenate([ops.ravel(number) for number in keras.tree.flatten(numbers)])  # of their widest dtype

    def split(self, vector: Any) -> Any:
        """Returns the nest on the host, in float64: sums over many steps outgrow float32."""
        rest = np.asarray(vector, np.float64)

        def next_part(like):
            nonlocal rest
            part, rest = rest[:like.size], rest[like.size:]
            return part.reshape(like.shape)

        return keras.tree.map_structure(next_part, self._like)


def to_json(measured: Any) -> Any:
    """Converts Means on the host to lists and dicts. float64 survives JSON exactly."""
    if isinstance(measured, Mean):
        return [measured.total.tolist(), measured.weight.tolist()]
    entries = measured if isinstance(measured, dict) else measured._asdict()
    return {name: to_json(entry) for name, entry in entries.items()}


def from_json(saved: dict) -> StepMeasurements:
    """Reverses `to_json`."""

    def mean(entry):
        return Mean(*(np.asarray(number, np.float64) for number in entry))

    def means(entries):
        return {name: mean(entry) for name, entry in entries.items()}

    batch = saved["batch"]
    return StepMeasurements(
        Measurements(means(batch["loss_terms"]), mean(batch["accuracy"]),
                     {layer: RouterStats(**means(stats)) for layer, stats in batch["routers"].items()}),
        *(mean(saved[name]) for name in ("tokens", "gradient_norm", "loss")))
