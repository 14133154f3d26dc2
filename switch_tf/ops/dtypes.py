"""Dtypes of a model's compute, and of its sums and softmaxes."""

import keras
from keras import ops

from switch_tf.configs.choices import check_choice
from switch_tf.hardware.devices import device_type
from switch_tf.partitioning.tensors import Tensor


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Returns the Keras dtype policy for a dtype of activations. Weights are float32, or float64 for "float64".

    Args:
        activation_dtype: "float32", "bfloat16" or "auto": bfloat16 on a TPU or GPU, float32 on a CPU. "float64"
            compares runs that differ only in the order of sums.
    """
    check_choice("ACTIVATION_DTYPE", activation_dtype, ("auto", "float32", "bfloat16", "float64"))
    if activation_dtype == "auto":
        activation_dtype = "float32" if device_type() == "CPU" else "bfloat16"
    return "mixed_bfloat16" if activation_dtype == "bfloat16" else activation_dtype


def wide_dtype(dtype: str, narrower: str = "float32") -> str:
    """Returns the dtype of sums in a model that computes in `dtype`: `narrower`, or float64.

    A float64 model has no float32 islands: their rounding would hide the differences it should show.
    """
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else narrower


def widen(x: Tensor) -> Tensor:
    """Casts a float tensor to float32; float64 stays."""
    x = ops.convert_to_tensor(x)
    return ops.cast(x, wide_dtype(x.dtype))
