"""The dtype that a model computes in, by device."""

import keras

from switch_tf.choices import check_choice


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Keras dtype policy with float32 weights for a dtype of activations.

    Args:
        activation_dtype: "float32", "bfloat16", or "auto": bfloat16 where there is a TPU or GPU, float32 on CPU.
    """
    check_choice("ACTIVATION_DTYPE", activation_dtype, ("auto", "float32", "bfloat16"))
    if activation_dtype == "auto":
        devices = keras.distribution.list_devices()
        is_on_cpu = all(device.lower().startswith("cpu") for device in devices)
        activation_dtype = "float32" if is_on_cpu else "bfloat16"
    return "mixed_bfloat16" if activation_dtype == "bfloat16" else "float32"
