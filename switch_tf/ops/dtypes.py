"""The dtype that a model computes in, and the wider dtype of its sums and softmaxes."""

import keras
from keras import ops

from switch_tf.configs.choices import check_choice
from switch_tf.hardware.devices import device_type
from switch_tf.partitioning.tensors import Tensor


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Returns the Keras dtype policy for a dtype of activations, with float32 weights, or float64 for "float64".

    Args:
        activation_dtype: "float32", "bfloat16" or "auto", which is bfloat16 on a TPU or GPU and float32 on a CPU.
            "float64" compares runs that differ only in the order of their sums.

    Raises:
        Refusal: An unknown dtype.
    """
    check_choice("ACTIVATION_DTYPE", activation_dtype, ("auto", "float32", "bfloat16", "float64"))
    if activation_dtype == "auto":
        activation_dtype = "float32" if device_type() == "CPU" else "bfloat16"
    return "mixed_bfloat16" if activation_dtype == "bfloat16" else activation_dtype


def wide_dtype(dtype: str, narrower: str = "float32") -> str:
    """Returns the dtype of values that a model computing in `dtype` keeps wide: `narrower`, or float64.

    A float64 model has no float32 islands, because their rounding would hide the differences that it is used to find.
    """
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else narrower


def widen(x: Tensor) -> Tensor:
    """Casts a tensor of any float dtype to float32; float64 stays."""
    x = ops.convert_to_tensor(x)
    return ops.cast(x, wide_dtype(x.dtype))
