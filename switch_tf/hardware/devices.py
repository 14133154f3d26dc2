"""The devices of this machine and their nominal rate.

Counting does not start them: started devices cannot be divided or joined.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import keras

from switch_tf.hardware import chips, host
from switch_tf.refusals import Refusal

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
# Keras's JAX back end needs no TensorFlow here.
if IS_TENSORFLOW:
    import tensorflow as tf

# Kind of this process's devices, unless TensorFlow chooses, and name if JAX's.
_chosen: tuple[str, str | None] | None = None


def device_type() -> str:
    """Returns what a run trains on: "TPU" or "GPU" if this machine has any, or "CPU"."""
    if not IS_TENSORFLOW:
        return keras.distribution.list_devices()[0].partition(":")[0].upper()
    if _chosen is not None:
        return _chosen[0]
    kinds = {device.device_type for device in tf.config.list_physical_devices()}
    if "TPU" in kinds or host.has_tpu():
        return "TPU"
    return "GPU" if "GPU" in kinds else "CPU"


def use_host(command: str, alternative: str = "") -> None:
    """On a machine with a TPU, makes the rest of this process run on the CPU, and prints so.

    Args:
        command: Name of a command on one device, such as "infer". A program on a TPU runs on all chips.
        alternative: A clause about what runs on the chips.
    """
    global _chosen
    if device_type() != "TPU":
        return
    print(f"`switch-tf {command}` runs on the CPU of this TPU VM: it works on one device, and a program on the TPU "
          f"would have to run on all of its chips{alternative}.", file=sys.stderr, flush=True)
    tf.config.set_visible_devices([], "TPU")
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"  # only this host
    os.environ.pop("MEGASCALE_NUM_SLICES", None)
    _chosen = "CPU", None


def use_jax(kind: str, name: str) -> None:
    """Makes this process train on JAX's devices, and TensorFlow use only the CPU.

    Args:
        kind: "CPU", "GPU" or "TPU".
        name: Name of the first, such as "NVIDIA H100 80GB HBM3".
    """
    global _chosen
    _chosen = kind, name
    if kind != "CPU":
        tf.config.set_visible_devices([], kind)


@contextlib.contextmanager
def supposed(kind: str, name: str) -> Iterator[None]:
    """Makes this process trace as if it trained on another machine's JAX devices (`use_jax`)."""
    global _chosen
    before, _chosen = _chosen, (kind, name)
    try:
        yield
    finally:
        _chosen = before


def are_jax() -> bool:
    """Returns whether this process trains on JAX's devices."""
    return _chosen is not None and _chosen[1] is not None


def device_name() -> str:
    """Returns a device's name such as "NVIDIA H200", or its kind if unknown."""
    kind = device_type()
    if are_jax() and kind != "CPU":
        return _chosen[1] or kind
    if kind != "GPU":
        return kind
    first = tf.config.list_physical_devices("GPU")[0]
    return tf.config.experimental.get_device_details(first).get("device_name") or kind


def nominal_flops(dtype: str) -> float | None:
    """Returns one device's FLOP/s in `dtype`. None for a CPU, part of a GPU or unknown device."""
    kind = device_type()
    if kind == "TPU" and dtype in ("bfloat16", "float32"):
        chip = chips.find_tpu_chip()
        return chip and chip.flops
    if kind != "GPU":
        return None
    # JAX's default for float32 is TensorFloat-32.
    is_tensor_float = are_jax() or tf.config.experimental.tensor_float_32_execution_enabled()
    if "MIG" in (name := device_name()).split() or dtype == "float32" and not is_tensor_float:
        return None
    return dict(zip(("bfloat16", "float32"), chips.gpu_flops(name), strict=False)).get(dtype)


def split_cpu(count: int) -> None:
    """Splits this machine's CPU into devices.

    Raises:
        Refusal: TensorFlow has started its devices, or `count` is below 1.
    """
    if count < 1:
        raise Refusal(f"A number of devices is at least 1, not {count}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise Refusal(f"The CPU cannot be made {count} devices after TensorFlow has used it; do it first."
                      ) from error
