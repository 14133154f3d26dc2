"""MultiWorkerMirroredStrategy: replicas on the devices of several processes."""

import tensorflow as tf

from switch_tf.hardware import devices
from switch_tf.partitioning.backends.strategy import StrategyPartitioner, check_data_only
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout


def create(layout: Layout, members: Cluster) -> StrategyPartitioner:
    """Creates this process's partitioner, which waits for the other processes.

    Raises:
        Refusal: The layout splits the model, or its mesh does not fit the devices.
    """
    check_data_only(layout)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    layout = layout.resolve(strategy.num_replicas_in_sync, devices.device_type())
    return StrategyPartitioner(layout, strategy, len(members.addresses), members.index)
