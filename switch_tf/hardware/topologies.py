"""Names of topologies: pods of TPU chips such as "v5e:4x4", and servers of GPUs such as "h100:2x8"."""

import re

from switch_tf.hardware import chips
from switch_tf.hardware.gpus import GPUS
from switch_tf.refusals import Refusal

_TPU = re.compile(r"(v[0-9][a-z]*|tpu7x):(\d+(?:x\d+){1,2})")
_GPU = re.compile(rf"({'|'.join(GPUS)}):(?:([1-9]\d*)x)?([1-8])")


def check(topology: str) -> None:
    """Raises Refusal unless the text has the form of a topology, without any compiler."""
    if not _TPU.fullmatch(topology) and not _GPU.fullmatch(topology):
        raise Refusal("A topology reads like v5e:4x4, v6e:16x16, v5p:4x4x4 or v4:4x4x4, and one of GPUs like h100:8 "
                      f"or, for two servers of up to 8, h100:2x8 ({', '.join(GPUS)}), not {topology!r}.")


def is_of_gpus(topology: str) -> bool:
    """Returns whether a topology that `check` accepts is one of GPUs."""
    return _GPU.fullmatch(topology) is not None


def kind(topology: str) -> str:
    """Returns the kind of the devices of a topology, "GPU" or "TPU"."""
    return "GPU" if is_of_gpus(topology) else "TPU"


def servers(topology: str) -> tuple[int, int]:
    """Returns the number of servers of a topology of GPUs, and of the GPUs in each."""
    _, count, size = _GPU.fullmatch(topology).groups()
    return int(count or 1), int(size)


def chip(topology: str) -> chips.Chip:
    """Returns the chip of a topology.

    Raises:
        Refusal: Its memory and speed are not known here.
    """
    return GPUS[topology.partition(":")[0]].chip if is_of_gpus(topology) else chips.of_topology(topology)
