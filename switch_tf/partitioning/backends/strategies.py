"""Strategies of tf.distribute: MirroredStrategy, OneDeviceStrategy and TPUStrategy.

Every device runs the whole step on its own part of the batch, and stores every variable whole. Each replica divides its
losses by the tokens of the whole batch. Groups of tokens and random numbers belong to the whole batch
(`axes.part_of_batch`), and gradients are summed. So any number of replicas takes the step that one device takes.

TPUStrategy has replicas of one core, or of several cores that XLA cuts by the layout's annotations. It needs a TPU and
has never run on one. Tests run its other parts under MirroredStrategy and OneDeviceStrategy.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding  # it has no public name

from switch_tf import context
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips, devices, host
from switch_tf.partitioning.backends import dtensor
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.lowering import XlaAnnotator
from switch_tf.partitioning.partitioner import Partitioner, at_step
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates the partitioner of "mirrored", "one_device" or "tpu".

    "one_device" is the first device, or one core of a TPU. Several processes train with DTensor instead. "tpu" is the
    TPU of this machine, or the one that TPU_NAME names.
    """
    kind, count = devices.device_type(), len(members.addresses)
    if layout.backend == "tpu":
        # On a TPU VM the chips are local. TPU_NAME, which Google's pages have users export there, is for others.
        name = None if host.has_tpu() else os.environ.get("TPU_NAME")
        if not name and not host.has_tpu():
            raise Refusal("backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with "
                          "TPU_NAME, or leave backend at 'auto'.")
        if count > 1:
            raise Refusal(f"backend='tpu' trains on the TPU of one host, but this run has {count} processes, and each "
                          "would train a model of its own; use backend='dtensor'.")
        split = [logical for logical, _ in layout.rules
                 if "data" in layout.mesh_axes(logical) and logical not in ("batch", "group")]
        if split or layout.at_rest_rules:
            raise Refusal("TPUStrategy keeps every variable whole on each core, so its layout cannot split "
                          f"{', '.join(split) or 'stored weights'} over the data axis; use backend='dtensor' with it.")
        return start_tpu(layout, name)
    if layout.backend == "one_device":
        if count > 1:
            return dtensor.create(layout, members)
        if kind == "TPU":
            return start_tpu(layout.resolve(1, kind), one_core=True)
        layout = layout.resolve(devices.num_local_devices(kind), kind).resolve(1, kind)
        return StrategyPartitioner(layout, tf.distribute.OneDeviceStrategy(f"{kind}:0"))
    if count > 1:
        raise Refusal(f"MirroredStrategy trains in one process, but TF_CONFIG names {count}; use backend='pjrt' or "
                      "'dtensor'.")
    if kind == "TPU":
        raise Refusal("MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu' or 'dtensor'.")
    layout = layout.resolve(devices.num_local_devices(kind), kind)
    if split := sorted({logical for logical, _ in (*layout.rules, *layout.at_rest_rules)} - {"batch", "group"}):
        raise Refusal("tf.distribute's mirrored back end copies the model to every device, so the layout cannot split "
                      f"{', '.join(split)}; use gin/layouts/data.gin, or backend='dtensor'.")
    return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(
        [f"{kind}:{index}" for index in range(layout.num_devices)]))


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

    def step(self, compute: Callable, apply: Callable, use_xla: bool = False) -> Callable:
        def computed(features):
            # A replica is traced in a thread of its own, which starts without this one's context.
            gradients, totals, *others = self.strategy.run(
                context.carried(lambda features: compute(self._share(features))), args=(features,))
            return gradients, totals, *self._first(others)

        def applied(gradients, totals):
            self._applies_sums = True
            try:
                self.strategy.run(context.carried(apply), args=(gradients, totals))
            finally:
                self._applies_sums = False

        return super().step(computed, applied)

    def results(self, call: Callable) -> Callable:
        return lambda features: self._first(self.strategy.run(
            context.carried(lambda features: call(self._share(at_step(features, 0)))), args=(features,)))

    def _on_each_device(self, function: Callable) -> Callable:
        return tf.function(lambda: self._first(self.strategy.run(function)), autograph=False)


class CoreAnnotator(XlaAnnotator):
    """Annotator of a replica of several cores, in the form of GSPMD (arXiv 2105.04663), over all axes but "data"."""

    def _split(self, x, spec):
        mesh = {axis: size for axis, size in self.layout.mesh.items() if axis != "data"}
        return sharding(spec, mesh).apply_to_tensor(x, use_sharding_op=True)


def sharding(spec: Sequence[Sequence[str]], mesh: dict[str, int]) -> xla_sharding.Sharding:
    """Converts a spec of `Layout.spec` to XLA's object: tiles along its mesh axes, copies along the others.

    Args:
        spec: Mesh axes that split each dimension. Axes that `mesh` lacks are ignored.
        mesh: Number of devices along each mesh axis. Devices are numbered row by row.
    """
    spec = [[axis for axis in axes if axis in mesh] for axes in spec]
    used = [axis for axes in spec for axis in axes]
    order = [list(mesh).index(axis) for axis in [*used, *(axis for axis in mesh if axis not in used)]]
    cores = np.arange(math.prod(mesh.values())).reshape(list(mesh.values())).transpose(order)
    tiles = [math.prod(mesh[axis] for axis in axes) for axes in spec]
    if len(used) == len(mesh):
        return xla_sharding.Sharding.tile(cores.reshape(tiles))
    return xla_sharding.Sharding.partial_tile(cores.reshape([*tiles, -1]))


class TPUPartitioner(StrategyPartitioner):
    """Replicas on a TPU, which runs the whole step with its condition. Each replica receives its own rows.

    Args:
        layout: Layout with its mesh complete.
        strategy: tf.distribute.TPUStrategy.
    """

    def __init__(self, layout: Layout, strategy: tf.distribute.Strategy):
        super().__init__(layout, strategy)
        self._annotator = CoreAnnotator(layout) if layout.num_devices > self.num_parts else None

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        super().check(config, steps_per_call, use_xla)
        chips.check_memory(8 * config.num_parameters, "TPUStrategy keeps weights and gradients whole on each device",
                           "use gin/layouts/fully_sharded.gin with backend='dtensor', which stores pieces")

    def place(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        size = next(iter(features.values())).shape[1] // self.num_parts

        def own_rows(context):
            first = context.replica_id_in_sync_group * size
            return {name: value[:, first:first + size] for name, value in features.items()}

        return self.strategy.experimental_distribute_values_from_function(own_rows)

    def part_of_step(self, features: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
        return at_step(self._first(features), index)

    def trace(self, function: Any, specs: dict[str, tf.TensorSpec]) -> None:
        # With rows on replicas, as in a call; a trace of whole batches would not be used.
        zeros = {name: tf.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
        function.get_concrete_function(self.place(zeros))

    def _share(self, features):
        return features

    def step(self, compute: Callable, apply: Callable, use_xla: bool = False) -> Callable:
        annotated = context.within(annotator=self._annotator)
        one_step = Partitioner.step(self, annotated(compute), annotated(apply))
        return lambda features, index: self._first(self.strategy.run(one_step, args=(features, index)))

    def results(self, call: Callable) -> Callable:
        return super().results(context.within(annotator=self._annotator)(call))


def start_tpu(layout: Layout, name: str | None = None, one_core: bool = False) -> TPUPartitioner:
    """Starts the TPU system and the strategy for it.

    A replica has as many cores as the product of the mesh axes other than "data".

    Args:
        layout: Layout. Its mesh may have an open axis.
        name: str, of a TPU elsewhere; None for the one of this machine.
        one_core: Whether to use one replica of one core.
    """
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name or "local")
    if name:
        tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    num_cores = topology.num_tasks * topology.num_tpus_per_task
    layout = layout.resolve(1 if one_core else num_cores, "TPU")
    num_replicas = layout.mesh.get("data", 1)
    cores = layout.num_devices // num_replicas
    if layout.num_devices == num_cores and cores == 1:
        return TPUPartitioner(layout, tf.distribute.TPUStrategy(resolver))
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=block(topology.mesh_shape, cores), num_replicas=num_replicas)
    strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment,
                                         experimental_spmd_xla_partitioning=cores > 1)
    return TPUPartitioner(layout, strategy)


def block(mesh_shape: Sequence[int], cores: int) -> list[int]:
    """Returns the shape of a block of neighbouring cores: its lengths along x, y, z and the cores of a chip.

    Args:
        mesh_shape: Shape of the TPU, in the same order.
        cores: Number of cores of one replica.
    """
    lengths, left = [1, 1, 1, 1], cores
    for axis in (3, 1, 0, 2):  # the cores of a chip first, because they are nearest
        lengths[axis] = math.gcd(left, int(mesh_shape[axis]))
        left //= lengths[axis]
    if left > 1:
        shape = "x".join(map(str, mesh_shape))
        raise Refusal(f"A replica of this layout has {cores} cores, and this TPU of {shape} (x, y, z, cores of "
                      "a chip) cannot be divided into blocks of that size; change the sizes of the mesh axes other "
                      "than 'data'.")
    return lengths
