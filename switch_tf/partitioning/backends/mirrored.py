"""MirroredStrategy: a replica on each GPU or CPU device of one process."""

import tensorflow as tf

from switch_tf.hardware import devices
from switch_tf.partitioning.backends.strategy import StrategyPartitioner, check_data_only
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal


def create(layout: Layout, members: Cluster) -> StrategyPartitioner:
    """Creates the partitioner of one process, which has a replica on each device.

    Raises:
        Refusal: Several processes, a TPU, or a layout that splits the model.
    """
    if len(members.addresses) > 1:
        raise Refusal(f"MirroredStrategy trains in one process, but TF_CONFIG names {len(members.addresses)}; "
                      "use backend='pjrt' or 'dtensor'.")
    kind = devices.device_type()
    if kind == "TPU":
        raise Refusal("MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu' or 'dtensor'.")
    layout = layout.resolve(devices.num_local_devices(kind), kind)
    check_data_only(layout)
    names = [f"{kind}:{index}" for index in range(layout.num_devices)]
    return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(names))
