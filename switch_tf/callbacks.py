"""A Keras callback that adds router statistics to the history of `fit`."""

from typing import Any

import keras
import numpy as np
from keras import ops

from switch_tf import checks
from switch_tf.layers.moe import Routed
from switch_tf.metrics import RouterStats
from switch_tf.refusals import Refusal

_MEANS = tuple(name for name in RouterStats._fields if name != "expert_load")


class RouterStatistics(keras.callbacks.Callback):
    """Router statistics of each epoch's training batches, for the history and the logs of later callbacks.

    Keys are `router/<statistic>` by the names of `metrics.RouterStats` (means over the epoch's tokens and over layers)
    and `router/dead_experts` (experts, over all layers, that no token chose). Sums accumulate on the device, and work
    with XLA, `steps_per_execution` and `tf.distribute`.

    Place it before callbacks that monitor a key, such as EarlyStopping. It makes `fit` retrace its step. `fit` raises
    Refusal for a model without experts, or a back end other than TensorFlow.

    Args:
        per_layer: Whether to also add `router/<layer>/<statistic>` for each layer.
    """

    def __init__(self, per_layer: bool = False):
        super().__init__()
        self.per_layer = checks.flag("per_layer", per_layer)
        self._observed = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if keras.backend.backend() != "tensorflow":
            raise Refusal(f"RouterStatistics needs Keras' TensorFlow back end, not {keras.backend.backend()}.")
        self._observed = _outermost_observed(self.model)
        if not self._observed:
            raise Refusal("RouterStatistics needs a model with experts; this one has no layer of them.")
        with self.model.distribute_strategy.scope():
            for layer in self._observed:
                layer.router_observer = _Sums(layer.routers)
        self.model.make_train_function(force=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        results = {name: result for layer in self._observed for name, result in layer.router_observer.take().items()}
        if logs is None:
            return
        for statistic in _MEANS:
            logs[f"router/{statistic}"] = float(np.mean([result[statistic] for result in results.values()]))
        logs["router/dead_experts"] = sum(result["dead_experts"] for result in results.values())
        if self.per_layer:
            logs.update({f"router/{name}/{statistic}": value for name, result in results.items()
                         for statistic, value in result.items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for layer in self._observed:
            layer.router_observer = None
        self._observed = []
        self.model.make_train_function(force=True)


def _outermost_observed(layer):
    if isinstance(layer, Routed):
        return [layer] if layer.routers else []
    inner = layer._flatten_layers(include_self=False, recursive=False)
    return [observed for child in inner for observed in _outermost_observed(child)]


class _Sums:
    """Sums of RouterStats over batches and replicas. `routers` has the number of experts by name."""

    def __init__(self, routers):
        self._routers = routers
        self._sums = _sum((len(routers), len(_MEANS), 2))  # totals and weights
        self._loads = [_sum((num_experts,)) for num_experts in routers.values()]

    def update(self, router_stats):
        numbers = [ops.cast(number, "float32") for stats in router_stats for name in _MEANS
                   for number in getattr(stats, name)]
        self._sums.assign_add(ops.reshape(ops.stack(numbers), self._sums.shape))
        for load, stats in zip(self._loads, router_stats, strict=True):
            load.assign_add(ops.cast(stats.expert_load.total, "float32"))

    def take(self):
        sums, *loads = (ops.convert_to_numpy(variable).copy() for variable in (self._sums, *self._loads))
        for variable in (self._sums, *self._loads):
            variable.assign(ops.zeros_like(variable))
        totals, weights = np.moveaxis(sums, -1, 0)
        means = np.divide(totals, weights, out=np.zeros_like(totals), where=weights != 0)
        return {name: {**dict(zip(_MEANS, map(float, row), strict=True)), "dead_experts": int(np.sum(load == 0))}
                for name, row, load in zip(self._routers, means, loads, strict=True)}


def _sum(shape):
    """Creates a sum over replicas, float32 even in a bfloat16 model."""
    return keras.Variable("zeros", shape, "float32", trainable=False, autocast=False, aggregation="sum",
                          synchronization="on_read")
