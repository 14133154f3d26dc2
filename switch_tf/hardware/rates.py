"""How fast known chips multiply matrices, in their makers' words: what utilisation is measured against."""

from switch_tf.hardware.devices import device_type
from switch_tf.hardware.host import accelerator_type

# FLOP/s of one TPU device in bfloat16, by how the accelerator type begins (Google Cloud's TPU pages; a
# device of v2 and v3 is half a chip). A float32 product is one of bfloat16, unless a program asks for more.
TPU_FLOPS = {"v2": 22.5e12, "v3": 61.5e12, "v4": 275e12, "v5litepod": 197e12, "v5p": 459e12, "v6e": 918e12}

# FLOP/s of one GPU in bfloat16 and in float32 as TensorFlow multiplies it (TF32), dense: half of what NVIDIA's data
# sheets of A100, H100 and H200 say "with sparsity". By words that must all be in the name that TensorFlow gives it; the
# first row that matches counts.
GPU_FLOPS = ((("H200", "NVL"), 835.5e12, 417.5e12), (("H200",), 989.5e12, 494.5e12),
             (("H100", "NVL"), 835.5e12, 417.5e12), (("H100", "PCIe"), 756.5e12, 378e12),
             (("H100",), 989.5e12, 494.5e12), (("A100",), 312e12, 156e12))


def nominal_flops(dtype: str) -> float | None:
    """FLOP/s of one of this machine's devices in `dtype`, None where nothing is known: CPUs, parts of a GPU, others."""
    kind = device_type()
    if kind == "TPU" and dtype in ("bfloat16", "float32"):
        return TPU_FLOPS.get(accelerator_type().partition("-")[0])
    return _gpu_flops(_gpu_name(), dtype) if kind == "GPU" else None


def _gpu_name():
    import tensorflow as tf

    return tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0]).get("device_name", "")


def _gpu_flops(name, dtype):
    import tensorflow as tf

    words = name.split()
    if "MIG" in words or dtype == "float32" and not tf.config.experimental.tensor_float_32_execution_enabled():
        return None
    for wanted, in_bfloat16, in_float32 in GPU_FLOPS:
        # "A100-SXM4-80GB" is an A100.
        if all(any(word.split("-")[0] == part for word in words) for part in wanted):
            return {"bfloat16": in_bfloat16, "float32": in_float32}.get(dtype)
    return None
