"""The least that a compiled step can take: nothing but the rates of its chips limits it."""

import functools
from typing import NamedTuple

from switch_tf.hardware.chips import Chip


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
    """Seconds of each collective by itself, once, while every other group does the same: rings over all links along its
    group; an all-to-all by the busiest link, as each byte takes every link on its way.
    """
    links_of_rings, links_to_next, busiest_link = (functools.cache(one) for one in (
        network.links_of_rings, network.links_to_next, network.busiest_link))

    def seconds(one):
        share = (one.group_size - 1) / one.group_size
        if "all-to-all" in one.kind:
            crossings = share * busiest_link(one.axes)
        elif one.kind == "collective-permute":
            crossings = 1 / links_to_next(one.axes)
        else:
            factor = {"all-reduce": 2 * share, "reduce-scatter": one.group_size - 1}.get(one.kind, share)
            crossings = factor / links_of_rings(one.axes)
        return float(crossings * one.bytes / chip.link_bandwidth)

    return [seconds(one) for one in sent]
