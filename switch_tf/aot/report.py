"""How long a compiled step may take: the rates of chips, and its roofline."""

import functools
from typing import NamedTuple

from switch_tf.partitioning.devices import TPU_GIB


class Chip(NamedTuple):
    """One device of a topology: bytes for a program, bfloat16 FLOP/s, bytes/s of its memory and, one way, of its links.
    """

    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float


# What the runtime keeps for itself, as the compiler says of v5e where it refuses a program.
RESERVED = 2**28


def _chip(kind, flops, memory_bandwidth, link_bandwidth):
    return Chip(TPU_GIB[kind] * 2**30 - RESERVED, flops, memory_bandwidth, link_bandwidth)


# From Google Cloud's TPU pages; the links of v4 and v6e are sums over links that were not checked against a run.
CHIPS = {"v3": _chip("v3", 61.5e12, 450e9, 82e9), "v4": _chip("v4", 275e12, 1228e9, 135e9),
         "v5e": _chip("v5litepod", 197e12, 819e9, 100e9), "v5p": _chip("v5p", 459e12, 2765e9, 300e9),
         "v6e": _chip("v6e", 918e12, 1640e9, 224e9)}


class Roofline(NamedTuple):
    """Seconds of a step in each part if nothing else limited it: a prediction, never measured."""

    compute: float
    memory: float
    links: float

    @property
    def at_best(self) -> float:
        """All parts at the same time."""
        return max(self)

    @property
    def in_turn(self) -> float:
        """Links after the rest."""
        return max(self.compute, self.memory) + self.links


def link_seconds(sent, chip: Chip, network) -> float:
    """Seconds in which a chip sends what it must: rings over all links that lie along the group.

    In an all-to-all each byte goes to a chip of its own, and on its way takes a link of every chip between.
    """
    mean_hops = functools.cache(network.mean_hops)

    def seconds(one):
        share = (one.group_size - 1) / one.group_size
        factor = {"all-reduce": 2 * share, "reduce-scatter": one.group_size - 1, "collective-permute": 1.0}.get(
            one.kind, share)
        if "all-to-all" in one.kind:
            factor *= mean_hops(one.axes)
        return one.times * factor * one.bytes / (chip.link_bandwidth * network.share_of_links(one.axes))

    return sum(map(seconds, sent))


def roofline(flops: float, memory_traffic: float, link_seconds: float, chip: Chip) -> Roofline:
    """Seconds by part, for one chip's share of a step."""
    return Roofline(flops / chip.flops, memory_traffic / chip.memory_bandwidth, link_seconds)
