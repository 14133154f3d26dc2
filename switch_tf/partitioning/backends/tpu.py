"""TPUStrategy: replicas of one core, or of several cores that XLA cuts by the layout's annotations.

Needs a TPU and has never run on one. The parts that it shares with other strategies are tested there.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from switch_tf import context
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips, host
from switch_tf.partitioning.backends.strategy import StrategyPartitioner
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.gspmd import XlaAnnotator
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner, at_step
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class TPUPartitioner(StrategyPartitioner):
    """Replicas on a TPU, which runs the whole step with its condition. Each replica receives its own rows.

    Args:
        layout: Layout with its mesh complete.
        strategy: tf.distribute.TPUStrategy.
    """

    def __init__(self, layout: Layout, strategy: tf.distribute.Strategy):
        super().__init__(layout, strategy)
        within_replica = set(layout.mesh) - {"data"}
        self._annotator = XlaAnnotator(layout, within_replica) if layout.num_devices > self.num_parts else None

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        super().check(config, steps_per_call, use_xla)
        chips.check_memory(8 * config.num_parameters, "TPUStrategy keeps weights and gradients whole on each device",
                           "use gin/layouts/fully_sharded.gin with backend='dtensor', which stores pieces")

    def place(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        count = self.num_parts

        def own_rows(context):
            first = context.replica_id_in_sync_group
            return {name: value[:, first * (value.shape[1] // count):(first + 1) * (value.shape[1] // count)]
                    for name, value in features.items()}

        return self.strategy.experimental_distribute_values_from_function(own_rows)

    def part_of_step(self, features: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
        return at_step(self._first(features), index)

    def trace(self, function: Any, specs: dict[str, tf.TensorSpec]) -> None:
        # With rows on replicas, as in a call; a trace of whole batches would not be used.
        zeros = {name: tf.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
        function.get_concrete_function(self.place(zeros))

    def _share(self, features):
        return features

    def step(self, compute: Callable[..., Any], apply: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        annotated = context.within(annotator=self._annotator)
        one_step = Partitioner.step(self, annotated(compute), annotated(apply))
        return lambda features, index: self._first(self.strategy.run(one_step, args=(features, index)))

    def results(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return super().results(context.within(annotator=self._annotator)(call))


def create(layout: Layout, members: Cluster) -> TPUPartitioner:
    """Creates the partitioner of the TPU of this machine, or of the one that TPU_NAME names.

    Raises:
        Refusal: No TPU, several processes, or a layout that splits variables over the data axis.
    """
    # On a TPU VM the chips are local. TPU_NAME, which Google's pages have users export there, is for other machines.
    name = None if host.has_tpu() else os.environ.get("TPU_NAME")
    if not name and not host.has_tpu():
        raise Refusal("backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with "
                      "TPU_NAME, or leave backend at 'auto'.")
    if len(members.addresses) > 1:
        raise Refusal(f"backend='tpu' trains on the TPU of one host, but this run has {len(members.addresses)} "
                      "processes, and each would train a model of its own; use backend='dtensor'.")
    split = [logical for logical, _ in layout.rules
             if "data" in layout.mesh_axes(logical) and logical not in ("batch", "group")]
    if split or layout.at_rest_rules:
        raise Refusal("TPUStrategy keeps every variable whole on each core, so its layout cannot split "
                      f"{', '.join(split) or 'stored weights'} over the data axis; use backend='dtensor' with it.")
    return start(layout, name)


def start(layout: Layout, name: str | None = None, one_core: bool = False) -> TPUPartitioner:
    """Starts the TPU system and the strategy for it.

    A replica has as many cores as the product of the mesh axes other than "data".

    Args:
        layout: Layout. Its mesh may have an open axis.
        name: str, of a TPU elsewhere; None for the one of this machine.
        one_core: Whether to use one replica of one core.

    Raises:
        Refusal: The mesh does not fit the TPU.
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

    Raises:
        Refusal: The TPU cannot be divided into such blocks.
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
