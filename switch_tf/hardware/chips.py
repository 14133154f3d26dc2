"""Memory and nominal rates of TPU and GPU chips, from the documents of their makers."""

from typing import NamedTuple

from switch_tf.refusals import Refusal

# Bytes that the TPU runtime reserves, as the compiler reports for v5e when it refuses a program.
RESERVED = 2**28

# FLOPs of a matrix unit of 128 x 128 in a cycle.
_UNIT = 2 * 128 * 128


class Chip(NamedTuple):
    """One device: a TPU chip, half a chip of v2 and v3, or a GPU. Rates that are not known are None.

    Attributes:
        memory: Bytes that a program can use.
        flops: FLOP/s of bfloat16 products.
        memory_bandwidth: Bytes/s between its memory and its core.
        link_bandwidth: Bytes/s of each of its links, in one direction.
        clock: Cycles/s of its core; None for a GPU, whose compiler counts none.
        float32_flops: FLOP/s of float32 products, by default `flops`: a TPU multiplies them in bfloat16, unless a
            program asks for more.
    """

    memory: float
    flops: float
    memory_bandwidth: float | None
    link_bandwidth: float | None
    clock: float | None
    float32_flops: float | None = None

    def product_seconds(self, flops: float, is_float32: bool) -> float:
        """Returns the least seconds of matrix products; `is_float32`: whether their operands are."""
        return flops / (is_float32 and self.float32_flops or self.flops)

    @property
    def capacity(self) -> float:
        """Bytes of the device, including those that the runtime reserves."""
        return self.memory + RESERVED


def _chip(gib, flops, memory_bandwidth=None, link_bandwidth=None, units=None):
    clock = None if units is None else flops / (units * _UNIT)
    return Chip(gib * 2**30 - RESERVED, flops, memory_bandwidth, link_bandwidth, clock)


# From Google Cloud's TPU pages. Their bandwidth between chips adds up all links in both directions (v5e: 400 GB/s of
# four; 1.6 TB/s cross the middle of a pod, on 32). v3 and v4 are from Jouppi et al. 2023, "TPU v4". Clocks are those of
# the peak of a device's matrix units: v3 0.94 and v4 1.05 GHz (as in Jouppi), v5e 1.50, v5p, v6e 1.75.
CHIPS = {
    "v2": _chip(8, 22.5e12),
    "v3": _chip(16, 61.5e12, 450e9, 70e9, units=2),
    "v4": _chip(32, 275e12, 1228e9, 50e9, units=8),
    "v5e": _chip(16, 197e12, 819e9, 50e9, units=4),
    "v5p": _chip(95, 459e12, 2765e9, 100e9, units=8),
    "v6e": _chip(32, 918e12, 1640e9, 100e9, units=16),
}

# Names in accelerator types, such as v5litepod-8, that differ from those in topologies, such as v5e:2x4.
_NAMES = {"v5litepod": "v5e"}

# FLOP/s of one GPU in bfloat16 and in float32 as TensorFlow multiplies it (TF32), dense: half of what NVIDIA's data
# sheets of A100, H100 and H200 list "with sparsity". The first row with all words in TensorFlow's name counts.
GPU_FLOPS = (
    (("H200", "NVL"), 835.5e12, 417.5e12),
    (("H200",), 989.5e12, 494.5e12),
    (("H100", "NVL"), 835.5e12, 417.5e12),
    (("H100", "PCIe"), 756.5e12, 378e12),
    (("H100",), 989.5e12, 494.5e12),
    (("A100",), 312e12, 156e12),
)


def of_topology(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5e:4x4".

    Raises:
        Refusal: Its memory and speed are not known here.
    """
    pods = {name: chip for name, chip in CHIPS.items() if chip.clock}
    chip = pods.get(topology.partition(":")[0])
    if chip is None:
        raise Refusal(f"The memory and speed of the chips of {topology!r} are not known here; they are of "
                      f"{', '.join(pods)}.")
    return chip


def of_accelerator_type(accelerator_type: str) -> Chip | None:
    """Returns the chip of an accelerator type such as "v5litepod-8"; None if it is not known here."""
    name = accelerator_type.partition("-")[0]
    return CHIPS.get(_NAMES.get(name, name))


def gpu_flops(name: str) -> tuple[float, float] | None:
    """Returns the FLOP/s of a GPU in bfloat16 and in TensorFloat-32 by its name; None if they are not known here."""
    words = name.split()
    for wanted, bfloat16_flops, float32_flops in GPU_FLOPS:
        # "A100-SXM4-80GB" is an A100.
        if all(any(word.split("-")[0] == part for word in words) for part in wanted):
            return bfloat16_flops, float32_flops
    return None
