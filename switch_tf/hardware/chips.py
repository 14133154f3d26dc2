"""What the chips of TPU pods can do: memory, and nominal rates."""

from typing import NamedTuple

from switch_tf.hardware.memory import TPU_GIB
from switch_tf.hardware.rates import TPU_FLOPS
from switch_tf.refusals import Refusal


class Chip(NamedTuple):
    """One device of a topology: bytes for a program, bfloat16 FLOP/s, bytes/s of its memory and, one way, of
    each of its links, and cycles per second of its core."""

    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    clock: float


# What the runtime keeps for itself, as the compiler says of v5e where it refuses a program.
RESERVED = 2**28


def _chip(kind, memory_bandwidth, link_bandwidth, flops_per_cycle):
    return Chip(TPU_GIB[kind] * 2**30 - RESERVED, TPU_FLOPS[kind], memory_bandwidth, link_bandwidth,
                TPU_FLOPS[kind] / flops_per_cycle)


# FLOPs of a matrix unit of 128 x 128 in a cycle.
_UNIT = 2 * 128 * 128


# From Google Cloud's TPU pages, whose bandwidth between chips is that of all links in both directions (v5e: 400 GB/s of
# four; 1.6 TB/s cross the middle of a pod, on 32); of v3 and v4 from Jouppi et al. 2023, "TPU v4". Clocks are those at
# which a device's matrix units multiply at its peak: v3 0.94 and v4 1.05 GHz (as in Jouppi), v5e 1.50, v5p, v6e 1.75.
CHIPS = {"v3": _chip("v3", 450e9, 70e9, 2 * _UNIT), "v4": _chip("v4", 1228e9, 50e9, 8 * _UNIT),
         "v5e": _chip("v5litepod", 819e9, 50e9, 4 * _UNIT), "v5p": _chip("v5p", 2765e9, 100e9, 8 * _UNIT),
         "v6e": _chip("v6e", 1640e9, 100e9, 16 * _UNIT)}


def of(topology: str) -> Chip:
    """The chips of a topology such as "v5e:4x4".

    Raises:
        Refusal: their memory and speed are not known here.
    """
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        raise Refusal(f"The memory and speed of the chips of {topology!r} are not known here; they are of "
                      f"{', '.join(CHIPS)}.")
    return chip
