"""Strategies of tf.distribute: MirroredStrategy, OneDeviceStrategy and TPUStrategy. The last has never run on a TPU.

Every device stores every variable whole, and runs the whole step on its part of the batch. Replicas divide losses by
the tokens of the whole batch and sum gradients. With its groups and random numbers (`axes.part_of_batch`), they take
the same step as one device.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from switch_tf import context
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips, devices, host
from switch_tf.partitioning.backends import dtensor
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner, select_step
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates the partitioner of "mirrored", "one_device" or "tpu".

    "one_device" is the first device, or one core of a TPU; several processes train with DTensor. "tpu" is this
    machine's TPU, or the TPU named by TPU_NAME.
    """
    kind, count, backend = devices.device_type(), len(members.addresses), layout.backend
    if backend == "one_device":
        if count > 1:
            return dtensor.create(layout, members)
        if kind == "TPU":
            return _create_on_tpu(layout.resolve(1, kind))
        layout = layout.resolve(tf.experimental.dtensor.num_local_devices(kind), kind).resolve(1, kind)
        return StrategyPartitioner(layout, tf.distribute.OneDeviceStrategy(f"{kind}:0"))
    # A TPU VM has local chips. TPU_NAME is ignored there: Google's pages advise to export it.
    name = None if host.has_tpu() else os.environ.get("TPU_NAME")
    if backend == "tpu" and not name and not host.has_tpu():
        raise Refusal("backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with "
                      "TPU_NAME, or leave backend at 'auto'.")
    if count > 1:
        raise Refusal(f"backend={backend!r} trains in one process, on the devices of one host, but this run has "
                      f"{count} processes, and each would train a model of its own; use backend='pjrt'.")
    if split := sorted({logical for logical, _ in (*layout.rules, *layout.at_rest_rules)} - {"batch", "group"}):
        raise Refusal(f"backend={backend!r} copies the model to every device, so the layout cannot split "
                      f"{', '.join(split)}; use gin/layouts/data.gin, or backend='pjrt'.")
    if backend == "tpu":
        return _create_on_tpu(layout, name)
    if kind == "TPU":
        raise Refusal("MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu'.")
    layout = layout.resolve(tf.experimental.dtensor.num_local_devices(kind), kind)
    return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(
        [f"{kind}:{index}" for index in range(layout.num_devices)]))


def _create_on_tpu(layout, name=None):
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name or "local")
    if name:
        tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    num_cores = topology.num_tasks * topology.num_tpus_per_task
    layout = layout.resolve(num_cores, "TPU")
    one_core = None if layout.num_devices == num_cores else tf.tpu.experimental.DeviceAssignment.build(topology)
    return StrategyPartitioner(layout, tf.distribute.TPUStrategy(resolver, experimental_device_assignment=one_core))


class StrategyPartitioner(Partitioner):
    """Replicas of a strategy. MirroredStrategy traces them one after another."""

    def __init__(self, layout: Layout, strategy: tf.distribute.Strategy):
        super().__init__(layout)
        self.strategy = strategy
        self.num_parts = strategy.num_replicas_in_sync
        self._applies_sums = False  # whether `apply` is traced with summed gradients

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        if use_xla:
            raise Refusal(f"use_xla=True compiles the step of one device, and {type(self.strategy).__name__} runs "
                          "one on each; leave use_xla at False.")
        if devices.device_type() == "TPU":
            chips.check_memory(self.layout.stored_bytes(config.weights()))

    def creates_variables(self) -> AbstractContextManager:
        return self.strategy.scope()

    def _adopt(self, optimizer):
        # A Keras optimizer reads the strategy at creation, and would sum a step's gradients again. It must still sum
        # gradients of `fit`, or replicas would diverge.
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
        count, index = self.current_part()
        return {name: tf.reshape(value, (count, -1, *value.shape[1:]))[index] for name, value in features.items()}

    def _first(self, per_replica):
        """Returns the first replica's copy of tensors that are equal in all."""
        return tf.nest.map_structure(lambda value: self.strategy.experimental_local_results(value)[0], per_replica)

    def step(self, compute: Callable, apply: Callable, use_xla: bool = False) -> Callable:
        def computed(features):
            # A replica is traced in a thread of its own, without this context.
            gradients, totals, *statistics = self.strategy.run(
                context.carried(lambda features: compute(self._share(features))), args=(features,))
            return gradients, totals, *self._first(statistics)

        def applied(gradients, totals):
            self._applies_sums = True
            try:
                self.strategy.run(context.carried(apply), args=(gradients, totals))
            finally:
                self._applies_sums = False

        return super().step(computed, applied)

    def results(self, call: Callable) -> Callable:
        return lambda features: self._first(self.strategy.run(
            context.carried(lambda features: call(self._share(select_step(features, 0)))), args=(features,)))
