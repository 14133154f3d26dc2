"""The least that a compiled step can take: nothing but the rates of its chips limits it."""

import functools
from typing import NamedTuple

from switch_tf.aot.chips import Chip


class Roofline(NamedTuple):
    """Seconds of a step in each part if nothing else limited it."""

    compute: float
    memory: float
    links: float

    @classmethod
    def of(cls, flops: float, memory_traffic: float, link_seconds: float, chip: Chip):
        """The parts of one chip's share of a step; `memory_traffic` in bytes."""
        return cls(flops / chip.flops, memory_traffic / chip.memory_bandwidth, link_seconds)

    @property
    def floor(self) -> float:
        """All parts at the same time."""
        return max(self)


def link_seconds(sent, chip: Chip, network) -> float:
    """Seconds in which a chip sends all that it must in a step."""
    return sum(one.times * seconds for one, seconds in zip(sent, seconds_once(sent, chip, network), strict=True))


def seconds_once(sent, chip: Chip, network) -> list[float]:
    """Seconds of each collective by itself, once: a ring over all links that lie along its group.

    In an all-to-all each byte goes to a chip of its own, and on its way takes a link of every chip between.
    """
    mean_hops = functools.cache(network.mean_hops)

    def seconds(one):
        share = (one.group_size - 1) / one.group_size
        factor = {"all-reduce": 2 * share, "reduce-scatter": one.group_size - 1, "collective-permute": 1.0}.get(
            one.kind, share)
        if "all-to-all" in one.kind:
            factor *= mean_hops(one.axes)
        return float(factor * one.bytes / (chip.link_bandwidth * network.share_of_links(one.axes)))

    return [seconds(one) for one in sent]
