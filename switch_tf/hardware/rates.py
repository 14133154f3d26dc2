"""The nominal rate of this machine's devices, which utilisation is measured against."""

import keras

from switch_tf.hardware import accelerator, chips
from switch_tf.hardware.devices import are_jax, device_type, gpu_name

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def nominal_flops(dtype: str) -> float | None:
    """Returns the FLOP/s of one device in `dtype`; None for a CPU, a part of a GPU or an unknown device."""
    kind = device_type()
    if kind == "TPU" and dtype in ("bfloat16", "float32"):
        chip = chips.of_accelerator_type(accelerator.accelerator_type())
        return chip and chip.flops
    return _gpu_flops(gpu_name(), dtype) if kind == "GPU" else None


def _gpu_flops(name, dtype):
    # JAX multiplies float32 numbers in TensorFloat-32 by default, and nothing here changes that.
    is_tensor_float = are_jax() or tf.config.experimental.tensor_float_32_execution_enabled()
    if "MIG" in name.split() or dtype == "float32" and not is_tensor_float:
        return None
    return dict(zip(("bfloat16", "float32"), chips.gpu_flops(name) or (), strict=False)).get(dtype)
