"""What devices there are, asked without starting them: after that they could no longer be divided or joined."""

import keras

from switch_tf import environment


def device_type() -> str:
    """The kind that a run trains on, of those that this machine has: "TPU", "GPU" or "CPU"."""
    if keras.backend.backend() != "tensorflow":
        return keras.distribution.list_devices()[0].partition(":")[0].upper()
    import tensorflow as tf

    kinds = {device.device_type for device in tf.config.list_physical_devices()}
    if "TPU" in kinds or environment.has_tpu() and environment.installed_version("tensorflow-tpu"):
        return "TPU"
    return "GPU" if "GPU" in kinds else "CPU"


def split_cpu(count: int) -> None:
    """Makes `count` devices of this machine's CPU, before TensorFlow has started its devices.

    Raises:
        ValueError: it is too late, or not a positive number.
    """
    import tensorflow as tf

    if count < 1:
        raise ValueError(f"A number of devices is at least 1, not {count}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise ValueError(f"The CPU cannot be made {count} devices after TensorFlow has used it; do it first."
                         ) from error


def num_local_devices(kind: str) -> int:
    """Devices of a kind that this process has, virtual ones counted. Starts them."""
    import tensorflow as tf

    return len(tf.config.list_logical_devices(kind))
