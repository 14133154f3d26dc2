"""Back ends of training steps on devices."""

import importlib
import typing

from etils import epy

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.partitioning import cluster
from switch_tf.partitioning.layout import BACKENDS, Layout
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # imports Keras
    import jax

    from switch_tf.hardware import devices

if typing.TYPE_CHECKING:
    from switch_tf.partitioning.partitioner import Partitioner  # imports TensorFlow


def has_accelerators_of_jax() -> bool:
    """Returns whether `auto` is `pjrt`: on a TPU, or GPUs with JAX's client."""
    return devices.device_type() == "TPU" or host.has_gpu_of_jax()


def count_accelerators(backend: str) -> int:
    """Returns the number of TPU or GPU devices of all processes under `pjrt`, and starts them. 0 elsewhere."""
    if backend not in ("auto", "pjrt") or not has_accelerators_of_jax():
        return 0
    importlib.import_module(f"{__name__}.pjrt_client").start(cluster.members())
    return jax.device_count()


def create_partitioner(layout: Layout) -> "Partitioner":
    """Creates the partitioner of a layout for all processes that train together, and starts the devices.

    With several processes, call it before any TensorFlow operation.
    """
    backend, is_tpu = layout.backend, devices.device_type() == "TPU"
    if backend == "auto" and has_accelerators_of_jax():
        backend = "pjrt"
    if is_tpu and backend not in ("pjrt", "dtensor") and environment.installed_version("tensorflow-tpu") is None:
        raise Refusal(f"backend={backend!r} cannot use the TPU of this machine without tensorflow-tpu "
                      "(docs/cloud_tpu.md); use --backend=pjrt, which 'auto' stands for here.")
    return importlib.import_module(BACKENDS[backend]).create(layout, cluster.members())
