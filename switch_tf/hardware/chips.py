"""Memory and nominal rates of TPU and GPU chips, from their makers' documents, and their topologies.

A topology is a TPU pod, "v5e:4x4", or servers of GPUs, "h100:2x8".
"""

import math
import os
import re
from typing import NamedTuple

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.refusals import Refusal
from switch_tf.storage import outputs

# Bytes that the TPU runtime reserves, by the v5e compiler's messages.
RESERVED = 2**28

# FLOPs per cycle of a matrix unit of 128 x 128.
_UNIT = 2 * 128 * 128

# The TPU compiler's flags for weights in pieces and for all-to-alls (docs/compile.md).
_WHOLE_EINSUMS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
_ASYNC_ALL_TO_ALL = "--xla_tpu_enable_async_all_to_all=true"

# JAX's share of a GPU's memory, unless a variable sets it.
_SHARE = 0.75
SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class Chip(NamedTuple):
    """One device: a TPU chip, half a chip of v2, v3 and TPU7x, or a GPU. Unknown rates are None.

    Attributes:
        memory: Bytes that a program can use.
        flops: FLOP/s of bfloat16 products.
        memory_bandwidth: Bytes/s.
        link_bandwidth: Bytes/s of each link, in one direction.
        clock: Cycles/s, None for a GPU.
        float32_flops: FLOP/s of float32 products. None for `flops`: a TPU multiplies in bfloat16 by default.
    """

    memory: float
    flops: float
    memory_bandwidth: float | None
    link_bandwidth: float | None
    clock: float | None
    float32_flops: float | None = None


def _chip(gib, flops, memory_bandwidth=None, link_bandwidth=None, units=None):
    clock = None if units is None else flops / (units * _UNIT)
    return Chip(gib * 2**30 - RESERVED, flops, memory_bandwidth, link_bandwidth, clock)


# From Google Cloud's TPU pages, where bandwidths sum all links in both directions (v5e: 400 GB/s of four; 1.6 TB/s
# cross the middle of a pod, on 32). v3 and v4: Jouppi et al. 2023, "TPU v4". Clocks follow from the matrix units' peak:
# v3 0.94 and v4 1.05 GHz (as in Jouppi), v5e 1.50, v5p, v6e 1.75. A device of TPU7x (Ironwood) is half a chip. Assumed:
# the matrix units of v6e, so 2.2 GHz; half of each link's bandwidth; and the same bandwidth to the other half.
CHIPS = {
    "v2": _chip(8, 22.5e12),
    "v3": _chip(16, 61.5e12, 450e9, 70e9, units=2),
    "v4": _chip(32, 275e12, 1228e9, 50e9, units=8),
    "v5e": _chip(16, 197e12, 819e9, 50e9, units=4),
    "v5p": _chip(95, 459e12, 2765e9, 100e9, units=8),
    "v6e": _chip(32, 918e12, 1640e9, 100e9, units=16),
    "tpu7x": _chip(96, 1153.5e12, 3690e9, 50e9, units=16),
}

# Dense FLOP/s in bfloat16 and TF32, TensorFlow's float32: half the numbers "with sparsity" in NVIDIA's data sheets. The
# first row with all words in the name counts.
_GPU_FLOPS = {
    "H200 NVL": [835.5e12, 417.5e12],
    "H200": [989.5e12, 494.5e12],
    "H100 NVL": [835.5e12, 417.5e12],
    "H100 PCIe": [756.5e12, 378e12],
    "H100": [989.5e12, 494.5e12],
    "A100": [312e12, 156e12],
}


class Gpu(NamedTuple):
    """A GPU in a server with NVLink. Sizes are in bytes, bandwidths in bytes/s of one direction.

    Attributes:
        name: Name by CUDA.
        capability: Compute capability.
        cores: Number of multiprocessors.
        units: float32 units of a multiprocessor.
        shared_memory: Per multiprocessor. A block can have 1,024 less.
        cache: Size of L2.
        clock: Cycles/s.
        memory: As CUDA reports it.
        link_bandwidth: To its server's GPUs.
        network_bandwidth: To other servers.
    """

    name: str
    capability: int
    cores: int
    units: int
    shared_memory: int
    cache: int
    clock: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float

    def target(self) -> str:
        """Returns the GPU as text of XLA's `GpuTargetConfigProto`."""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            runtime_version {{ major: 12 minor: 9 }}
            dnn_version_info {{ major: 9 minor: 10 }}
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - 1024}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.units}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              memory_bandwidth: {self.memory_bandwidth:.0f}
              device_memory_size: {self.memory}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock / 1e9}
              cuda_compute_capability {{ major: {self.capability} }}
            }}"""


# From NVIDIA's data sheets. The network is a DGX's: 200 or 400 Gbit/s per GPU.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 40 * 2**20, 1.41e9, 85_100_068_864, 2.039e12, 300e9,
                25e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 50 * 2**20, 1.98e9, 84_942_979_072, 3.352e12, 450e9,
                50e9),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233_472, 50 * 2**20, 1.98e9, 150_110_000_000, 4.8e12, 450e9, 50e9),
}
_OF_TPUS = re.compile(r"(v[0-9][a-z]*|tpu7x):(\d+(?:x\d+){1,2})")
_OF_GPUS = re.compile(rf"({'|'.join(GPUS)}):(?:([1-9]\d*)x)?([1-8])")


def servers(topology: str) -> tuple[Gpu, int, int] | None:
    """Returns a topology's GPU, servers, and GPUs per server. None for TPUs."""
    if match := _OF_GPUS.fullmatch(topology):
        name, count, size = match.groups()
        return GPUS[name], int(count or 1), int(size)
    if not _OF_TPUS.fullmatch(topology):
        raise Refusal("A topology reads like v5e:4x4, v6e:16x16, v5p:4x4x4, v4:4x4x4 or tpu7x:2x2x1, and one of GPUs "
                      f"like h100:8 or, for two servers of up to 8, h100:2x8 ({', '.join(GPUS)}), not {topology!r}.")
    return None


def full_name(topology: str) -> str:
    """Returns libtpu's name of a topology, or of Google Cloud's v5litepod-8 and NVIDIA's a100-80gb."""
    name = re.sub(r"^(v7x|ironwood):", "tpu7x:", topology)
    name = re.sub(r"^(a100-80|h100-80|h200-141)gb\b", lambda match: match[1][:4], name)
    if match := re.fullmatch(r"(v4|v5p|v5litepod|v5e|v6e)-(\d+)", name):
        kind, count = match[1].replace("litepod", "e"), int(match[2])
        axes = 2 if kind[2:] == "e" else 3  # with three, the number is of cores, two a chip
        power = (count // (axes - 1)).bit_length() - 1
        if power >= 0 and count == (axes - 1) << power:
            sides = [1 << (power + axis) // axes for axis in range(axes)]
            name = f"{kind}:{'x'.join(map(str, sides if axes == 2 or power > 2 else reversed(sides)))}"
    return f"{name}:1" if name in GPUS else name


def kind(topology: str) -> str:
    """Returns the kind of a topology's devices, "GPU" or "TPU"."""
    return "GPU" if servers(topology) else "TPU"


def find_chip(topology: str) -> Chip:
    """Returns a topology's chip. A GPU has the memory that JAX takes."""
    name = topology.partition(":")[0]
    if gpu := GPUS.get(name):
        flops, float32_flops = gpu_flops(gpu.name)
        return Chip(_share() * gpu.memory, flops, gpu.memory_bandwidth, gpu.link_bandwidth, None, float32_flops)
    pods = {name: chip for name, chip in CHIPS.items() if chip.clock}
    if name not in pods:
        raise Refusal(f"The memory and speed of the chips of {topology!r} are not known here; they are of "
                      f"{', '.join(pods)}.")
    return pods[name]


def set_compiler_flags(tpu: str) -> None:
    """Gives the TPU compiler the flags of docs/compile.md, unless the user set LIBTPU_INIT_ARGS, and prints so.

    Call it before libtpu is loaded.

    Args:
        tpu: A topology such as "v5e:4x4", a type such as "v5litepod-16", or "" if unknown.
    """
    if "LIBTPU_INIT_ARGS" in environment.OF_USER:
        return
    flags, (name, _, sizes) = _WHOLE_EINSUMS, tpu.replace("-", ":").partition(":")
    # On more chips of v5e the compiler refuses the second flag.
    if name and (name not in ("v5e", "v5litepod") or math.prod(map(int, re.findall(r"\d+", sizes))) < 128):
        flags += f" {_ASYNC_ALL_TO_ALL}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()  # after JAX's own flag
    outputs.say(f"LIBTPU_INIT_ARGS is not set, so the TPU compiler gets {flags} (docs/compile.md).")


def _share():
    for variable in filter(os.environ.get, SHARE_VARIABLES):
        text = os.environ[variable]
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
            raise Refusal(f"{variable} is the share of a GPU's memory that JAX takes, a number up to 1 such as 0.9, "
                          f"not {text!r}; correct or unset it.")
        return float(text)
    return _SHARE


def find_tpu_chip() -> Chip | None:
    """Returns this machine's TPU chip, if known."""
    name = host.accelerator_type().partition("-")[0]
    return CHIPS.get({"v5litepod": "v5e"}.get(name, name))


def check_memory(num_bytes: int, room: float | None = None) -> None:
    """Raises Refusal if a device has no room for its weights and gradients.

    Args:
        room: Bytes. Defaults to this machine's TPU, unlimited if unknown.
    """
    if room is None and (chip := find_tpu_chip()):
        room = chip.memory + RESERVED
    if room is not None and num_bytes > room:
        raise Refusal(f"Each device would store {num_bytes / 2**30:.1f} GiB of weights and gradients, and has "
                      f"{room / 2**30:.1f} GiB; use more devices, or a layout that cuts the weights into smaller "
                      "pieces (at_rest_rules, as in gin/layouts/fully_sharded.gin) with backend='pjrt'.")


def gpu_flops(name: str) -> list[float]:
    """Returns a GPU's FLOP/s in bfloat16 and TensorFloat-32, or [] if unknown."""
    words = {word.split("-")[0] for word in name.split()}  # "A100-SXM4-80GB" is an A100
    return next((flops for model, flops in _GPU_FLOPS.items() if words.issuperset(model.split())), [])
