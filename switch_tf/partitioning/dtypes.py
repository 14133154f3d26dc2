"""The dtype that a model computes in, by device."""

from switch_tf.choices import check_choice
from switch_tf.partitioning.devices import device_type


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Keras dtype policy with float32 weights for a dtype of activations.

    Args:
        activation_dtype: "float32", "bfloat16", or "auto": bfloat16 where there is a TPU or GPU, float32 on CPU.
    """
    check_choice("ACTIVATION_DTYPE", activation_dtype, ("auto", "float32", "bfloat16"))
    if activation_dtype == "auto":
        activation_dtype = "float32" if device_type() == "CPU" else "bfloat16"
    return "mixed_bfloat16" if activation_dtype == "bfloat16" else "float32"
