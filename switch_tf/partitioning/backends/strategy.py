"""tf.distribute: every device runs the whole step on its own part of the batch, and stores every variable whole.

Each replica divides its losses by the tokens of the whole batch. Groups of tokens and random numbers belong to the
whole batch (`parts`), and gradients are summed. So any number of replicas takes the step that one device takes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from switch_tf import context
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner, at_step
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


def check_data_only(layout: Layout) -> None:
    """Raises Refusal if the layout splits anything but the batch."""
    split = sorted({logical for logical, _ in (*layout.rules, *layout.at_rest_rules)} - {"batch", "group"})
    if split:
        raise Refusal(f"tf.distribute's {layout.backend} back end copies the model to every device, so the layout "
                      f"cannot split {', '.join(split)}; use gin/layouts/data.gin, or backend='dtensor'.")


class StrategyPartitioner(Partitioner):
    """Replicas of a strategy, which take turns while they are traced.

    Args:
        layout: Layout with its mesh complete.
        strategy: Strategy of tf.distribute for the devices of this process.
    """

    def __init__(self, layout: Layout, strategy: tf.distribute.Strategy):
        super().__init__(layout)
        self.strategy = strategy
        self.num_parts = strategy.num_replicas_in_sync
        self._applies_sums = False  # whether `apply` is being traced, whose gradients are sums over the replicas

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        if use_xla:
            raise Refusal(f"use_xla=True compiles the step of one device, and {type(self.strategy).__name__} runs "
                          "one on each; leave use_xla at False.")

    def creates_variables(self) -> AbstractContextManager:
        return self.strategy.scope()

    def _adopt(self, optimizer):
        # Keras reads the strategy when an optimizer is created, and would sum gradients of a step again. It must sum
        # those of `fit`, or replicas would diverge.
        all_reduce = optimizer._all_reduce_sum_gradients
        object.__setattr__(optimizer, "_distribution_strategy", self.strategy)
        object.__setattr__(optimizer, "_all_reduce_sum_gradients",
                           lambda gradients: gradients if self._applies_sums else all_reduce(gradients))
        for variable in optimizer.variables:
            variable._value = tf.Variable(
                variable.value.numpy(), dtype=variable.dtype, trainable=False, name=variable.name,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def sum_over_parts(self, tensors: Any) -> Any:
        flat = tf.nest.flatten(tensors)
        summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, flat)
        return tf.nest.pack_sequence_as(tensors, summed)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return tf.distribute.get_replica_context().all_gather(rows, axis=0)

    def current_part(self) -> tuple[int, Tensor]:
        return self.num_parts, tf.distribute.get_replica_context().replica_id_in_sync_group

    def _share(self, features):
        """Returns this replica's rows of the batch."""
        count, index = self.current_part()
        return {name: tf.reshape(value, (count, -1, *value.shape[1:]))[index] for name, value in features.items()}

    def _first(self, per_replica):
        """Returns the first replica's copy of tensors that are equal in all of them."""
        return tf.nest.map_structure(lambda value: self.strategy.experimental_local_results(value)[0], per_replica)

    def step(self, compute: Callable[..., Any], apply: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        def one_step(features, index):
            # A replica is traced in a thread of its own, which starts without this one's context.
            gradients, totals, measured, is_finite = self.strategy.run(
                context.carried(lambda features, index: compute(self._share(at_step(features, index)))),
                args=(features, index))
            measured, is_finite = self._first((measured, is_finite))

            def update():
                self._applies_sums = True
                try:
                    self.strategy.run(context.carried(apply), args=(gradients, totals))
                finally:
                    self._applies_sums = False
                return True

            tf.cond(is_finite, update, lambda: False)
            return measured, is_finite

        return one_step

    def results(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda features: self._first(self.strategy.run(
            context.carried(lambda features: call(self._share(at_step(features, 0)))), args=(features,)))

    def _on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(lambda: self._first(self.strategy.run(function)), autograph=False)
