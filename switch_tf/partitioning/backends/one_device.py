"""One device under a strategy of `tf.distribute`: the first of its kind, or one core of a TPU."""

import tensorflow as tf

from switch_tf.hardware import devices
from switch_tf.partitioning.backends import dtensor, tpu
from switch_tf.partitioning.backends.strategy import StrategyPartitioner
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates the partitioner of one device; several processes have several, and train with DTensor.

    Raises:
        Refusal: The mesh has more than one device.
    """
    if len(members.addresses) > 1:
        return dtensor.create(layout, members)
    kind = devices.device_type()
    if kind == "TPU":
        return tpu.start(layout.resolve(1, kind), one_core=True)
    layout = layout.resolve(devices.num_local_devices(kind), kind).resolve(1, kind)
    return StrategyPartitioner(layout, tf.distribute.OneDeviceStrategy(f"{kind}:0"))
