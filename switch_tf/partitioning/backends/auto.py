"""The default: one device without a strategy, or DTensor for several."""

from switch_tf.hardware import devices
from switch_tf.partitioning.backends import dtensor
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates the partitioner of one device, or DTensor's for several devices, several processes or a TPU."""
    kind = devices.device_type()
    if len(members.addresses) == 1 and kind != "TPU":
        layout = layout.resolve(devices.num_local_devices(kind), kind)
        if layout.num_devices == 1:
            return Partitioner(layout)
    return dtensor.create(layout, members)
