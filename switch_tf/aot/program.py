"""Collectives, FLOPs and memory traffic of one chip in a step, counted in its optimised program.

A loop's body counts once per pass, a condition by its costlier branch.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from switch_tf.aot import clock, hlo
from switch_tf.hardware.chips import Chip
from switch_tf.hardware.network import Network, Servers

_COLLECTIVE = re.compile(
    r"(all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|ragged-all-to-all)(-start)?")
_SCATTER = "all-reduce-scatter"  # prefix of computations that sum and keep one part


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: XLA's kind.
        bytes: Of the result on one chip.
        group_size: Devices in a group.
        axes: Mesh axes along which a group extends.
        shape: Text of the largest array.
        where: Layer, or "gradient of" a layer.
        times: Runs in a step.
    """

    kind: str
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    shape: str
    where: str
    times: int = 1

    def seconds(self, chip: Chip, network: Network | Servers) -> float:
        """Returns the seconds of one run, with all groups running at once.

        Rings use all links along their group. The busiest link limits an all-to-all.
        """
        share = (self.group_size - 1) / self.group_size
        if "all-to-all" in self.kind:
            crossings = share * network.busiest_link(self.axes)
        elif self.kind == "collective-permute":
            crossings = 1 / network.links_to_next(self.axes)
        else:
            factor = {"all-reduce": 2 * share, "reduce-scatter": self.group_size - 1}.get(self.kind, share)
            crossings = factor / network.links_of_rings(self.axes)
        return float(crossings * self.bytes / chip.link_bandwidth)


class Roofline(NamedTuple):
    """Least seconds of a step in each part, by nominal rates."""

    compute: float
    memory: float
    links: float


class Program:
    """A parsed, optimised program of a step.

    Args:
        text: XLA's text.
        mesh: Mesh axis -> size, in the order of its devices.

    Attributes:
        flops: FLOPs of all matrix products.
        expert_products: Sizes of the results of the experts' matrix products, on one chip.
        memory_traffic: Bytes to and from a chip's memory, without on-chip memory. Counts whole operands, even if only a
            part is read.
        unread_loops: Names of loops with unknown passes.
    """

    def __init__(self, text: str, mesh: dict[str, int]):
        self._module = module = hlo.Module(text)
        self._sent, self._carriers = read_collectives(module, mesh)
        self.collectives = list(self._sent.values())
        self._products = [(module.times.get(computation, 0), instruction)
                          for computation, instructions in module.computations.items()
                          for instruction in instructions if instruction.is_product]
        self.flops = sum(times * module.flops(product) for times, product in self._products)
        self.expert_products = [math.prod(hlo.lengths(product.shape)) for _, product in self._products
                                if re.search(r"/experts(_\d+)?/", product.operation)]
        self.memory_traffic = _traffic(module, module.entry)
        self.unread_loops = [loop for loop, count in module.loops.items() if count is None]

    def roofline(self, chip: Chip, network: Network | Servers) -> Roofline:
        """Returns the least seconds of a step on a chip."""
        return Roofline(
            sum(times * self._module.product_seconds(product, chip) for times, product in self._products),
            self.memory_traffic / chip.memory_bandwidth,
            sum(collective.times * collective.seconds(chip, network) for collective in self.collectives))

    def schedule(self, chip: Chip, network: Network | Servers) -> clock.Schedule:
        """Predicts a step's schedule on a chip."""
        sends = {name: one.seconds(chip, network) for name, one in self._sent.items()}
        return clock.schedule(chip, self._module, sends, self._carriers)


def _traffic(module, computation):
    sizes, total = {}, 0.0
    for instruction in module.computations[computation]:
        sizes[instruction.name] = sum(array.bytes for array in instruction.written if not array.is_on_chip)
        if instruction.kind in hlo.INNER:
            total += (module.loops.get(instruction.name) or 1) * max(
                _traffic(module, inner) for inner in instruction.called[hlo.INNER[instruction.kind]])
        elif instruction.kind in ("copy-start", "slice-start"):
            # The size, once for each end off the chip. Its shape is (result, source) or ((sources), result).
            ends = hlo.arrays(instruction.shape)[:2]
            total += min(end.bytes for end in ends) * sum(not end.is_on_chip for end in ends)
        elif instruction.kind not in hlo.NAMES and not instruction.kind.endswith("-done"):
            total += sizes[instruction.name] + sum(sizes.get(operand, 0) for operand in set(instruction.operands))
    return total


def read_collectives(module: hlo.Module, mesh: dict[str, int]) -> tuple[dict[str, Collective], dict[str, str]]:
    """Returns {name: collective}, and {name of a fusion that starts, continues or awaits one: its name}.

    `mesh` sizes are in the order of its devices.
    """
    carried = [(fusion.name, inner) for instructions in module.computations.values() for fusion in instructions
               if fusion.kind == "fusion" for inner in module.fused(fusion) if _COLLECTIVE.fullmatch(inner.kind)]
    fused = {inner.name for _, inner in carried}
    ends = {instruction.operands[0]: instruction for instruction in module.instructions.values()
            if instruction.kind.endswith("-done")}
    # first_names: identity -> first of several copies.
    collectives, first_names = {}, {}
    for computation, instructions in module.computations.items():
        is_scatter = computation.startswith(_SCATTER)
        for instruction in instructions:
            match = _COLLECTIVE.fullmatch(instruction.kind)
            if match is None or instruction.name in fused and not is_scatter and first_names.setdefault(
                    _identity(instruction), instruction.name) != instruction.name:
                continue
            # An asynchronous collective's end has its shape. Without it, the operand is first, and flags are last.
            arrays = hlo.arrays(ends.get(instruction.name, instruction).shape)
            if instruction.name not in ends and match[2] and match[1] != "all-reduce":
                arrays = arrays[1:2]
            kind, size = match[1], sum(array.bytes for array in arrays)
            devices = _first_group(instruction.line, math.prod(mesh.values()))
            places = np.unravel_index(devices, tuple(mesh.values()))
            axes = tuple(axis for axis, along in zip(mesh, places, strict=True) if len(np.unique(along)) > 1)
            if is_scatter:
                kind, size = "reduce-scatter", size // len(devices)
            largest = max(arrays, key=lambda array: array.bytes).text if arrays else ""
            collectives[instruction.name] = Collective(
                kind, size, len(devices), axes, largest, module.layer(instruction),
                module.times.get(computation, 1))
    return collectives, {fusion: inner.name if inner.name in collectives else first_names[_identity(inner)]
                         for fusion, inner in carried}


def _identity(instruction):
    """Returns a key shared by all copies of a collective, one for each operation that it overlaps.

    Combined collectives share a channel.
    """
    channel = re.search(r"channel_id=\d+", instruction.line)
    arrays = (array.text for array in hlo.arrays(instruction.shape))
    return (channel[0], instruction.kind, *arrays) if channel else instruction.name


def _first_group(line, num_devices):
    """Returns the devices of a collective's first group. XLA has three notations."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return _integers(match[1])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _iota(match[2], match[3]).reshape(_integers(match[1]))[0].ravel()
    if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? *\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        if order := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", match[2] or f"[{math.prod(sizes.values())}]"):
            devices = _iota(order[1], order[2])
        else:
            devices = np.array(_integers(match[2]))
        index = dict.fromkeys(sizes, [0])
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[3]):
            # A whole axis, or a part with `before` pieces to the left.
            count = int(size or sizes[name])
            step = sizes[name] // (int(before or 1) * count)
            index[name] = range(0, step * count, step)
        return devices.reshape(*sizes.values())[np.ix_(*index.values())].ravel()
    if match := re.search(r"replica_groups=(?!\{\})\S+", line):
        raise ValueError(f"The groups of a collective are in an unknown notation of XLA: {match[0]}")
    return range(num_devices)


def _integers(text):
    return [int(number) for number in text.split(",")]


def _iota(lengths, order):
    """Returns 0, 1, ... in a shape such as "2,4", transposed by "1,0" or None."""
    devices = np.arange(math.prod(_integers(lengths))).reshape(_integers(lengths))
    return devices.transpose(_integers(order)) if order else devices
