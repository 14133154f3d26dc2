"""From a layout and a machine to the partitioner of a run; what does not fit is refused before anything starts."""

import dataclasses
import os
import sys

from switch_tf import environment
from switch_tf.hardware import devices
from switch_tf.partitioning import cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal


def create_partitioner(layout: Layout) -> Partitioner:
    """The partitioner for a layout on the devices that this process, and those that train with it, have.

    Starts the devices, so nothing of TensorFlow may have run before where there are several processes.

    Raises:
        Refusal: the mesh does not fit the devices, or a back end that this machine cannot have.
    """
    members = cluster.members()
    if layout.backend == "tpu":
        return _tpu(layout, members)
    if layout.backend == "multi_worker_mirrored":
        return _multi_worker(layout, members)
    if len(members.addresses) > 1:
        if layout.backend == "mirrored":
            raise Refusal(f"MirroredStrategy trains in one process, but TF_CONFIG names {len(members.addresses)}; "
                          "use backend='multi_worker_mirrored' or 'dtensor'.")
        return _dtensor_processes(layout, members)
    kind = devices.device_type()
    if kind == "TPU":
        return _on_tpu(layout)
    layout = layout.resolve(devices.num_local_devices(kind), kind)
    if layout.backend == "one_device":
        import tensorflow as tf

        from switch_tf.partitioning.backends.strategy import StrategyPartitioner

        layout = layout.resolve(1, kind)
        return StrategyPartitioner(layout, tf.distribute.OneDeviceStrategy(f"{kind}:0"))
    if layout.backend == "mirrored":
        import tensorflow as tf

        from switch_tf.partitioning.backends.strategy import StrategyPartitioner

        _check_data_only(layout)
        names = [f"{kind}:{index}" for index in range(layout.num_devices)]
        return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(names))
    if layout.num_devices == 1 and layout.backend == "auto":
        return Partitioner(layout)
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.backends.dtensor import DTensorPartitioner, check_layout

    check_layout(layout)
    if kind == "GPU":
        # Makes a CPU device for each GPU, without which a checkpoint cannot be written.
        _initialize(kind)
    names = [f"{kind}:{index}" for index in range(layout.num_devices)]
    return DTensorPartitioner(layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names))


def _on_tpu(layout):
    if layout.backend == "mirrored":
        raise Refusal("MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu' or 'dtensor'.")
    if layout.backend == "one_device":
        from switch_tf.partitioning.backends import tpu

        return tpu.create(layout.resolve(1, "TPU"), one_core=True)
    return _dtensor_on_tpu(layout)


def _dtensor_on_tpu(layout):
    """Never run on hardware, here or below where there are several processes."""
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.backends.dtensor import DTensorPartitioner, check_layout

    check_layout(layout)
    # First of all: once TensorFlow has listed its devices it refuses.
    _initialize("TPU")
    count = dtensor.num_global_devices("TPU")
    layout = on_every_chip(layout, count).resolve(count, "TPU")
    check_layout(layout)
    # Not XLA's partitioner (`use_xla_spmd`): under it variables have no layout, and the first step ends the process.
    # The devices in the order of the torus, x first; by default TensorFlow makes rings of all axes but the first.
    mesh = dtensor.create_tpu_mesh(list(layout.mesh), list(layout.mesh.values()), "", ring_dims=0, use_xla_spmd=False)
    return DTensorPartitioner(layout, mesh)


def on_every_chip(layout: Layout, count: int) -> Layout:
    """Returns a layout for all `count` TPU devices, as a mesh needs; one without rules then splits the batch over them.

    Raises:
        Refusal: the layout has rules and is for one device.
    """
    if layout.num_devices > 1 or layout.open_axes or count == 1:
        return layout
    if layout.rules or layout.at_rest_rules:
        raise Refusal(f"MESH_SHAPE {layout.mesh_shape!r} is for one device, but a program on this TPU runs on all "
                      f"of its {count}; make the product of its sizes {count}.")
    print(f"This run has no layout, so its batch is split over the {count} devices of the TPU, as by "
          "gin/layouts/data.gin; Layout.backend='one_device' trains on one of them.", file=sys.stderr, flush=True)
    rules = (("batch", "data"), ("group", "data"))
    return dataclasses.replace(layout, mesh_shape=f"data={count}", rules=rules)


def _dtensor_processes(layout, members):
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.backends.dtensor import DTensorPartitioner, check_layout

    kind = devices.device_type()
    cluster.tell_dtensor(members)
    if kind == "TPU":
        return _dtensor_on_tpu(layout)
    local = dtensor.num_local_devices(kind)
    layout = layout.resolve(local * len(members.addresses), kind)
    check_layout(layout)
    # TensorFlow makes the virtual CPU devices anew here, and must be told how many.
    _initialize(kind, **({"num_logical_cpu_devices": local} if kind == "CPU" else {}))
    mesh = dtensor.create_distributed_mesh(list(layout.mesh.items()), device_type=kind)
    return DTensorPartitioner(layout, mesh)


def _initialize(kind, **options):
    from tensorflow.experimental import dtensor

    if kind == "GPU":
        os.environ.setdefault("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "1")
    dtensor.initialize_accelerator_system(kind, **options)


def _multi_worker(layout, members):
    import tensorflow as tf

    from switch_tf.partitioning.backends.strategy import StrategyPartitioner

    _check_data_only(layout)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    layout = layout.resolve(strategy.num_replicas_in_sync, devices.device_type())
    return StrategyPartitioner(layout, strategy, len(members.addresses), members.index)


def _tpu(layout, members):
    # On a TPU VM the chips are local. TPU_NAME, which Google's pages have users export there, is for other machines.
    name = None if environment.has_tpu() else os.environ.get("TPU_NAME")
    if not name and not environment.has_tpu():
        raise Refusal("backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with "
                      "TPU_NAME, or leave backend at 'auto'.")
    if len(members.addresses) > 1:
        raise Refusal(f"backend='tpu' trains on the TPU of one host, but TF_CONFIG or TPU_WORKER_HOSTNAMES names "
                      f"{len(members.addresses)} processes, and each would train a model of its own; use "
                      "backend='dtensor'.")
    split = [logical for logical, _ in layout.rules
             if "data" in layout.mesh_axes(logical) and logical not in ("batch", "group")]
    if split or layout.at_rest_rules:
        raise Refusal("TPUStrategy keeps every variable whole on each core, so its layout cannot split "
                      f"{', '.join(split) or 'stored weights'} over the data axis; use backend='dtensor' with it.")
    from switch_tf.partitioning.backends import tpu

    return tpu.create(layout, name)


def _check_data_only(layout):
    split = sorted({logical for logical, _ in (*layout.rules, *layout.at_rest_rules)} - {"batch", "group"})
    if split:
        raise Refusal(f"tf.distribute's {layout.backend} back end copies the model to every device, so the layout "
                      f"cannot split {', '.join(split)}; use gin/layouts/data.gin, or backend='dtensor'.")
