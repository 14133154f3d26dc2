"""The default: PJRT on TPUs and GPUs of JAX; elsewhere one device without a strategy, or DTensor for several."""

from etils import epy

from switch_tf.hardware import devices, host
from switch_tf.partitioning.backends import dtensor
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner

with epy.lazy_imports():  # most runs do without JAX
    import jax

    from switch_tf.partitioning.backends import pjrt, pjrt_client


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates PJRT's partitioner on accelerators that JAX has a client for, else that of one device or DTensor's."""
    if devices.is_tpu_of_jax():
        pjrt_client.start(members)
        return pjrt.create(dtensor.batch_over_chips(layout, jax.device_count(), "pjrt"), members)
    if host.has_gpu_of_jax():
        return pjrt.create(layout, members)
    kind = devices.device_type()
    if len(members.addresses) == 1 and kind != "TPU":
        layout = layout.resolve(devices.num_local_devices(kind), kind)
        if layout.num_devices == 1:
            return Partitioner(layout)
    return dtensor.create(layout, members)
