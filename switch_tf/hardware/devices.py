"""What devices there are, asked without starting them: after that they could no longer be divided or joined."""

import os
import sys

import keras

from switch_tf import environment
from switch_tf.refusals import Refusal

_only_host = False


def device_type() -> str:
    """The kind that a run trains on, of those that this machine has: "TPU", "GPU" or "CPU"."""
    if keras.backend.backend() != "tensorflow":
        return keras.distribution.list_devices()[0].partition(":")[0].upper()
    if _only_host:
        return "CPU"
    import tensorflow as tf

    kinds = {device.device_type for device in tf.config.list_physical_devices()}
    if "TPU" in kinds or environment.has_tpu() and environment.installed_version("tensorflow-tpu"):
        return "TPU"
    return "GPU" if "GPU" in kinds else "CPU"


def use_host(command: str) -> None:
    """On a machine with a TPU, makes the rest of this process run on the host's CPU, alone, and prints so.

    For commands that run on one device: a program on a TPU has to run on all of its chips.

    Args:
        command: str, what the user typed, such as "infer".
    """
    global _only_host
    if device_type() != "TPU":
        return
    import tensorflow as tf

    print(f"`switch-tf {command}` runs on the CPU of this TPU VM: it works on one device, and a program on the TPU "
          "would have to run on all of its chips.", file=sys.stderr, flush=True)
    tf.config.set_visible_devices([], "TPU")
    os.environ.pop("TPU_WORKER_HOSTNAMES", None)
    _only_host = True


def split_cpu(count: int) -> None:
    """Makes `count` devices of this machine's CPU, before TensorFlow has started its devices.

    Raises:
        Refusal: it is too late, or not a positive number.
    """
    import tensorflow as tf

    if count < 1:
        raise Refusal(f"A number of devices is at least 1, not {count}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise Refusal(f"The CPU cannot be made {count} devices after TensorFlow has used it; do it first."
                      ) from error


def num_local_devices(kind: str) -> int:
    """Devices of a kind that this process has, virtual ones counted. Starts CPUs, but not GPUs."""
    import tensorflow as tf

    if kind == "GPU":  # which DTensor's accelerator system has to find not started
        from tensorflow.experimental import dtensor

        return dtensor.num_local_devices(kind)
    return len(tf.config.list_logical_devices(kind))
