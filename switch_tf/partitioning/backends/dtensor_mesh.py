"""Starts DTensor's devices and lays a mesh over them. The TPU's has never run on hardware."""

import dataclasses
import os
import sys

from tensorflow.experimental import dtensor

from switch_tf.hardware import devices
from switch_tf.partitioning import cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal


def start(layout: Layout, members: cluster.Cluster) -> tuple[Layout, dtensor.Mesh]:
    """Starts the devices of this process.

    Args:
        layout: Layout. Its mesh may have an open axis.
        members: Cluster of the processes that train together.

    Returns:
        The layout with its mesh complete, and DTensor's mesh.

    Raises:
        Refusal: DTensor cannot run the layout, or its mesh does not fit the devices.
    """
    kind = devices.device_type()
    num_processes = len(members.addresses)
    layout.check_processes(num_processes)
    if num_processes > 1:
        cluster.configure_dtensor(members)
    if kind == "TPU":
        return _tpu_mesh(layout)
    if num_processes > 1:
        return _mesh_of_processes(layout, kind, num_processes)
    layout = layout.resolve(devices.num_local_devices(kind), kind)
    check_layout(layout)
    if kind == "GPU":
        # Makes a CPU device for each GPU, which writing a checkpoint needs.
        _initialize(kind)
    names = [f"{kind}:{index}" for index in range(layout.num_devices)]
    return layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names)


def check_layout(layout: Layout) -> None:
    """Refuses a layout that splits one dimension of activations over several mesh axes.

    Raises:
        Refusal: Names the logical axes and the layouts that do run.
    """
    if split := layout.axes_over_several:
        raise Refusal(f"The layout splits {' and '.join(split)} over several mesh axes at once, and DTensor splits "
                      "an axis of activations over one; use backend='pjrt', which splits it over all of them, "
                      "gin/layouts/expert.gin or fully_sharded.gin, or leave all of these mesh axes but one at "
                      "size 1 in MESH_SHAPE.")


def on_every_chip(layout: Layout, count: int) -> Layout:
    """Returns a layout for all `count` devices of a TPU, as its mesh needs; without rules, one that splits the batch.

    Raises:
        Refusal: The layout has rules and is for one device.
    """
    if layout.num_devices == 1 and not layout.open_axes and count > 1 and (layout.rules or layout.at_rest_rules):
        raise Refusal(f"MESH_SHAPE {layout.mesh_shape!r} is for one device, but a program on this TPU runs on all "
                      f"of its {count}; make the product of its sizes {count}.")
    return batch_over_chips(layout, count, "one_device")


def batch_over_chips(layout: Layout, count: int, one_device: str) -> Layout:
    """Returns a layout that splits the batch over a TPU, and prints so, for a run without rules on one device.

    Args:
        layout: Layout of the run, returned as it is if it has rules or several devices.
        count: Number of devices of the TPU.
        one_device: Back end that trains on one of them.
    """
    if layout.num_devices > 1 or layout.rules or layout.at_rest_rules or count == 1:
        return layout
    print(f"This run has no layout, so its batch is split over the {count} devices of the TPU, as by "
          f"gin/layouts/data.gin; --backend={one_device} trains on one of them.", file=sys.stderr, flush=True)
    rules = (("batch", "data"), ("group", "data"))
    return dataclasses.replace(layout, mesh_shape=f"data={count}", rules=rules)


def _tpu_mesh(layout):
    check_layout(layout)
    # First, because TensorFlow refuses it after it has listed its devices.
    _initialize("TPU")
    count = dtensor.num_global_devices("TPU")
    layout = on_every_chip(layout, count).resolve(count, "TPU")
    check_layout(layout)
    # Without XLA's partitioner (`use_xla_spmd`), under which variables have no layout and the first step aborts. The
    # devices are in the order of the torus, x first; by default TensorFlow makes rings of all axes but the first.
    mesh = dtensor.create_tpu_mesh(list(layout.mesh), list(layout.mesh.values()), "", ring_dims=0, use_xla_spmd=False)
    return layout, mesh


def _mesh_of_processes(layout, kind, num_processes):
    num_local_devices = dtensor.num_local_devices(kind)
    layout = layout.resolve(num_local_devices * num_processes, kind)
    check_layout(layout)
    # TensorFlow creates the virtual CPU devices again here, and needs their number.
    _initialize(kind, **({"num_logical_cpu_devices": num_local_devices} if kind == "CPU" else {}))
    return layout, dtensor.create_distributed_mesh(list(layout.mesh.items()), device_type=kind)


def _initialize(kind, **options):
    if kind == "GPU":
        os.environ.setdefault("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "1")
    dtensor.initialize_accelerator_system(kind, **options)
