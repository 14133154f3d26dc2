"""From a layout and a machine to the partitioner of a run; what does not fit is refused before anything starts."""

import os

from switch_tf import cluster, environment
from switch_tf.partitioning import devices
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner


def create_partitioner(layout: Layout) -> Partitioner:
    """The partitioner for a layout on the devices that this process, and those that train with it, have.

    Starts the devices, so nothing of TensorFlow may have run before where there are several processes.

    Raises:
        ValueError: the mesh does not fit the devices, or a back end that this machine cannot have.
    """
    members = cluster.members()
    if layout.backend == "tpu":
        return _tpu(layout)
    if layout.backend == "multi_worker_mirrored":
        return _multi_worker(layout, members)
    if len(members.addresses) > 1:
        if layout.backend == "mirrored":
            raise ValueError(f"MirroredStrategy trains in one process, but TF_CONFIG names {len(members.addresses)}; "
                             "use backend='multi_worker_mirrored' or 'dtensor'.")
        return _dtensor_processes(layout, members)
    kind = devices.device_type()
    if kind == "TPU" and layout.backend in ("auto", "dtensor"):
        return _dtensor_on_tpu(layout)
    layout = layout.resolve(devices.num_local_devices(kind), kind)
    if layout.backend == "one_device":
        import tensorflow as tf

        from switch_tf.partitioning.strategy import StrategyPartitioner

        layout = layout.resolve(1, kind)
        return StrategyPartitioner(layout, tf.distribute.OneDeviceStrategy(f"{kind}:0"))
    if layout.backend == "mirrored":
        import tensorflow as tf

        from switch_tf.partitioning.strategy import StrategyPartitioner

        _check_data_only(layout)
        names = [f"{kind}:{index}" for index in range(layout.num_devices)]
        return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(names))
    if layout.num_devices == 1 and layout.backend == "auto":
        return Partitioner(layout)
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.dtensor import DTensorPartitioner

    names = [f"{kind}:{index}" for index in range(layout.num_devices)]
    return DTensorPartitioner(layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names))


def _dtensor_on_tpu(layout):
    """Never run on hardware, here or below where there are several processes."""
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.dtensor import DTensorPartitioner
    from switch_tf.partitioning.gspmd import XlaAnnotator

    # First of all: once TensorFlow has listed its devices it refuses.
    dtensor.initialize_accelerator_system("TPU")
    layout = layout.resolve(dtensor.num_global_devices("TPU"), "TPU")
    # XLA's partitioner instead of DTensor's: the one that ahead-of-time compilation verifies. TensorFlow's own tests
    # leave out variables on such meshes as not supported yet.
    mesh = dtensor.create_distributed_mesh(list(layout.mesh.items()), device_type="TPU", use_xla_spmd=True)
    # Where DTensor cannot say how activations lie, XLA is told.
    annotator = XlaAnnotator(layout, tuple(layout.mesh)) if layout.axes_over_several else None
    return DTensorPartitioner(layout, mesh, annotator)


def _dtensor_processes(layout, members):
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.dtensor import DTensorPartitioner

    kind = devices.device_type()
    cluster.tell_dtensor(members)
    if kind == "TPU":
        return _dtensor_on_tpu(layout)
    local = dtensor.num_local_devices(kind)
    layout = layout.resolve(local * len(members.addresses), kind)
    # TensorFlow makes the virtual CPU devices anew here, and must be told how many.
    virtual = {"num_logical_cpu_devices": local} if kind == "CPU" else {}
    dtensor.initialize_accelerator_system(kind, **virtual)
    mesh = dtensor.create_distributed_mesh(list(layout.mesh.items()), device_type=kind)
    return DTensorPartitioner(layout, mesh)


def _multi_worker(layout, members):
    import tensorflow as tf

    from switch_tf.partitioning.strategy import StrategyPartitioner

    _check_data_only(layout)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    layout = layout.resolve(strategy.num_replicas_in_sync, devices.device_type())
    return StrategyPartitioner(layout, strategy, len(members.addresses), members.index)


def _tpu(layout):
    name = os.environ.get("TPU_NAME")
    if not name and not environment.has_tpu():
        raise ValueError("backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with "
                         "TPU_NAME, or leave backend at 'auto'.")
    split = [logical for logical, _ in layout.rules
             if "data" in layout.mesh_axes(logical) and logical not in ("batch", "group")]
    if split or layout.at_rest_rules:
        raise ValueError("TPUStrategy keeps every variable whole on each core, so its layout cannot split "
                         f"{', '.join(split) or 'stored weights'} over the data axis; use backend='dtensor' with it.")
    from switch_tf.partitioning import tpu

    return tpu.create(layout, name)


def _check_data_only(layout):
    split = sorted({logical for logical, _ in (*layout.rules, *layout.at_rest_rules)} - {"batch", "group"})
    if split:
        raise ValueError(f"tf.distribute's {layout.backend} back end copies the model to every device, so the layout "
                         f"cannot split {', '.join(split)}; use gin/layouts/data.gin, or backend='dtensor'.")
