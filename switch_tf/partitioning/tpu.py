"""TPUStrategy: replicas of one core, or of several that a layout's rules divide by annotations for XLA.

What stands here needs a TPU and has never run on one; what it shares with other strategies is tested there.
"""

import tensorflow as tf

from switch_tf.partitioning import memory
from switch_tf.partitioning.axes import annotated_by
from switch_tf.partitioning.gspmd import XlaAnnotator
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.strategy import StrategyPartitioner


class TPUPartitioner(StrategyPartitioner):
    """The whole step runs on the TPU, condition included; each replica is sent its own rows."""

    def __init__(self, layout, strategy):
        super().__init__(layout, strategy)
        within_replica = set(layout.mesh) - {"data"}
        self._annotator = XlaAnnotator(layout, within_replica) if layout.num_devices > self.num_parts else None

    def check(self, config, steps_per_call, use_xla):
        memory.check(8 * config.num_parameters, memory.TPU_STRATEGY)

    def place(self, features):
        count = self.num_parts

        def own_rows(context):
            first = context.replica_id_in_sync_group
            return {name: value[:, first * (value.shape[1] // count):(first + 1) * (value.shape[1] // count)]
                    for name, value in features.items()}

        return self.strategy.experimental_distribute_values_from_function(own_rows)

    def _share(self, features):
        return features

    def step(self, compute, apply, use_xla=False):
        annotated = annotated_by(self._annotator)
        one_step = Partitioner.step(self, annotated(compute), annotated(apply))
        return lambda features, index: self._first(self.strategy.run(one_step, args=(features, index)))

    def results(self, call):
        return super().results(annotated_by(self._annotator)(call))


def create(layout, name=None) -> TPUPartitioner:
    """Starts the TPU system, of this machine or the one called `name`, and the strategy for it.

    A replica has as many cores as the mesh has beside its data axis.
    """
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name or "local")
    if name:
        tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    layout = layout.resolve(topology.num_tasks * topology.num_tpus_per_task, "TPU")
    num_replicas = layout.mesh.get("data", 1)
    cores = layout.num_devices // num_replicas
    if cores == 1:
        strategy = tf.distribute.TPUStrategy(resolver)
    else:
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=[1, 1, 1, cores], num_replicas=num_replicas)
        strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment,
                                             experimental_spmd_xla_partitioning=True)
    return TPUPartitioner(layout, strategy)
