"""The dtype that a model computes in, by device, and what is kept out of a narrow one."""

import keras
from keras import ops

from switch_tf.configs.choices import check_choice
from switch_tf.hardware.devices import device_type


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Keras dtype policy for a dtype of activations; its weights are float32, or float64 where everything is.

    Args:
        activation_dtype: "float32", "bfloat16", or "auto": bfloat16 where there is a TPU or GPU, float32 on CPU; and
            "float64", to compare runs that differ in the order of their sums alone.
    """
    check_choice("ACTIVATION_DTYPE", activation_dtype, ("auto", "float32", "bfloat16", "float64"))
    if activation_dtype == "auto":
        activation_dtype = "float32" if device_type() == "CPU" else "bfloat16"
    return "mixed_bfloat16" if activation_dtype == "bfloat16" else activation_dtype


def wide_dtype(dtype, narrower="float32") -> str:
    """What a model that computes in `dtype` takes for what selective precision keeps in `narrower`.

    A float64 model has no float32 islands: rounding there would hide what its float64 is for.
    """
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else narrower


def widen(x):
    """A tensor of any float dtype as float32, or as the float64 that it is."""
    x = ops.convert_to_tensor(x)
    return ops.cast(x, wide_dtype(x.dtype))
