"""The least time of a compiled step, limited only by the nominal rates of its chips."""

from typing import NamedTuple

from switch_tf.aot.collectives import Collective
from switch_tf.hardware.chips import Chip
from switch_tf.hardware.network import Network


class Roofline(NamedTuple):
    """Seconds of a step in each part if nothing else limited it."""

    compute: float
    memory: float
    links: float

    @classmethod
    def of(cls, product_seconds: float, memory_traffic: float, link_seconds: float, chip: Chip) -> "Roofline":
        """Returns the roofline of one chip's share of a step; `memory_traffic` in bytes."""
        return cls(product_seconds, memory_traffic / chip.memory_bandwidth, link_seconds)

    @property
    def floor(self) -> float:
        """Seconds if all parts overlap."""
        return max(self)


def link_seconds(collectives: list[Collective], chip: Chip, network: Network) -> float:
    """Returns the seconds of sending in a step."""
    seconds = seconds_once(collectives, chip, network)
    return sum(collective.times * once for collective, once in zip(collectives, seconds, strict=True))


def seconds_once(collectives: list[Collective], chip: Chip, network: Network) -> list[float]:
    """Returns the seconds of each collective, run once, while every other group does the same.

    Rings use all links along their group. An all-to-all takes as long as its busiest link.
    """
    def seconds(collective):
        size, axes = collective.group_size, collective.axes
        share = (size - 1) / size
        if "all-to-all" in collective.kind:
            crossings = share * network.busiest_link(axes)
        elif collective.kind == "collective-permute":
            crossings = 1 / network.links_to_next(axes)
        else:
            factor = {"all-reduce": 2 * share, "reduce-scatter": size - 1}.get(collective.kind, share)
            crossings = factor / network.links_of_rings(axes)
        return float(crossings * collective.bytes / chip.link_bandwidth)

    return [seconds(collective) for collective in collectives]
