"""Collectives, FLOPs and memory traffic of one chip in a step, counted in the optimised program.

A loop's body counts as often as it runs, and a condition by its more expensive branch.
"""

import functools
import math
import re

from switch_tf.aot import clock, collectives, hlo, product_flops, roofline
from switch_tf.hardware.chips import Chip
from switch_tf.hardware.network import Network


class Program:
    """A parsed, optimised program.

    Args:
        text: XLA's text of the program.
        mesh: Mesh axis -> size, in the order of its devices.
    """

    def __init__(self, text: str, mesh: dict[str, int]):
        self._module = hlo.Module(text)
        self._mesh = mesh

    @functools.cached_property
    def _collectives(self):
        return collectives.read(self._module, self._mesh)

    @property
    def collectives(self) -> list[collectives.Collective]:
        """All collectives of the program."""
        return [*self._collectives.values()]

    def schedule(self, chip: Chip, network: Network, default: str) -> clock.Schedule:
        """Runs the program by the compiler's clock. For the arguments see `clock.schedule`."""
        seconds = roofline.seconds_once(self.collectives, chip, network)
        carriers = collectives.carriers(self._module, self._mesh)
        sends = clock.SendTimes(dict(zip(self._collectives, seconds, strict=True)), carriers)
        return clock.schedule(self._module, chip, sends, default)

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of all matrix products."""
        times = self._module.times
        return sum(times.get(computation, 0) * product_flops.of(self._module, product)
                   for computation, product in self._products())

    def product_seconds(self, chip: Chip) -> float:
        """Returns the least seconds of all matrix products on a chip."""
        times = self._module.times
        return sum(times.get(computation, 0) * product_flops.seconds(self._module, product, chip)
                   for computation, product in self._products())

    def expert_products(self) -> list[int]:
        """Returns the size of the result of each matrix product of the experts, on one chip."""
        return [math.prod(hlo.lengths(product.shape)) for _, product in self._products()
                if re.search(r"/experts(_\d+)?/", product.operation)]

    def _products(self):
        return [(computation, instruction) for computation, instructions in self._module.computations.items()
                for instruction in instructions if instruction.is_product]

    def memory_traffic(self) -> float:
        """Returns the bytes that a chip reads from and writes to its memory. On-chip memory does not count.

        An operation that reads a part of an operand counts all of it.
        """
        return self._traffic(self._module.entry)

    def _traffic(self, computation):
        sizes, total = {}, 0.0
        for instruction in self._module.computations[computation]:
            sizes[instruction.name] = _in_memory(instruction.written)
            called = instruction.called
            if instruction.kind == "while":
                total += (self._module.loops[instruction.name] or 1) * self._traffic(called["body"][0])
            elif instruction.kind == "conditional":
                total += max(self._traffic(branch) for branch in called["branches"])
            elif instruction.kind in ("call", "call-start"):
                total += self._traffic(called["to_apply"][0])
            elif instruction.kind in ("copy-start", "slice-start"):
                # A copy between two memories: its size, once for each end that is not on the chip.
                total += _moved(instruction)
            elif instruction.kind not in hlo.NAMES and not instruction.kind.endswith("-done"):
                total += sizes[instruction.name] + sum(
                    sizes.get(operand, 0) for operand in set(instruction.operands))
        return total

    @property
    def unread_loops(self) -> list[str]:
        """Names of loops with an unknown number of passes. They count once."""
        return [loop for loop, count in self._module.loops.items() if count is None]


class InTurn:
    """Programs that run one after the other, counted as one. The methods are those of `Program`."""

    def __init__(self, programs: list[Program]):
        self._programs = programs

    @property
    def collectives(self) -> list[collectives.Collective]:
        return [collective for program in self._programs for collective in program.collectives]

    @property
    def flops(self) -> float:
        return sum(program.flops for program in self._programs)

    def product_seconds(self, chip: Chip) -> float:
        return sum(program.product_seconds(chip) for program in self._programs)

    def expert_products(self) -> list[int]:
        return [size for program in self._programs for size in program.expert_products()]

    def memory_traffic(self) -> float:
        return sum(program.memory_traffic() for program in self._programs)

    def schedule(self, chip: Chip, network: Network, defaults: list[str]) -> clock.Schedule:
        """Runs the programs by the compiler's clock; `defaults` has a default part for each program."""
        return clock.in_turn([program.schedule(chip, network, default) for program, default in
                              zip(self._programs, defaults, strict=False)])

    @property
    def unread_loops(self) -> list[str]:
        return [loop for program in self._programs for loop in program.unread_loops]


def _in_memory(shape):
    return sum(array.bytes for array in hlo.arrays(shape) if not array.is_on_chip)


def _moved(instruction):
    """Returns the bytes moved by a "copy-start" (result, source) or "slice-start" ((sources), result)."""
    ends = hlo.arrays(instruction.shape)[:2]
    return min(end.bytes for end in ends) * sum(not end.is_on_chip for end in ends)
