"""What a chip sends, multiplies, and reads and writes in its memory in a step, counted in the optimised program.

A loop's body counts as often as it runs. Of a condition's branches the more costly one counts.
"""

import functools
import math
import re

from switch_tf.aot import clock, collectives, hlo, product_flops, roofline
from switch_tf.hardware.chips import Chip


class Program:
    """An optimised program, parsed.

    Args:
        text: str, XLA's text of it.
        mesh: dict, mesh axis -> size, in the order of its devices.
    """

    def __init__(self, text: str, mesh: dict[str, int]):
        self._module = hlo.Module(text)
        self._mesh = mesh

    @functools.cached_property
    def _sent(self):
        return collectives.read(self._module, self._mesh)

    @property
    def collectives(self) -> list[collectives.Collective]:
        """Every collective."""
        return [*self._sent.values()]

    def schedule(self, chip: Chip, network, default: str) -> clock.Schedule:
        """The program by the compiler's own clock; arguments as for `clock.schedule` and `roofline.seconds_once`."""
        seconds = roofline.seconds_once(self.collectives, chip, network)
        carriers = collectives.carriers(self._module, self._mesh)
        sends = clock.SendTimes(dict(zip(self._sent, seconds, strict=True)), carriers)
        return clock.schedule(self._module, chip, sends, default)

    @functools.cached_property
    def flops(self) -> float:
        """Multiplications and additions of all matrix products."""
        instructions, times = self._module.instructions, self._module.times
        return sum(times.get(computation, 0) * product_flops.count(
            product.line, hlo.lengths(product.shape), lambda operand: hlo.lengths(instructions[operand].shape))
            for computation, product in self._products())

    def expert_products(self) -> list[int]:
        """Numbers in the result of each matrix product of the experts, on one chip."""
        return [math.prod(hlo.lengths(product.shape)) for _, product in self._products()
                if re.search(r"/experts(_\d+)?/", product.operation)]

    def _products(self):
        return [(computation, instruction) for computation, instructions in self._module.computations.items()
                for instruction in instructions if instruction.kind in ("convolution", "dot")]

    def memory_traffic(self) -> float:
        """Bytes that a chip reads from its memory and writes to it; what stays in its on-chip memory does not count.

        An operation that reads a part of an operand counts all of it.
        """
        return self._traffic(self._module.entry)

    def _traffic(self, computation):
        sizes, total = {}, 0.0
        for instruction in self._module.computations[computation]:
            sizes[instruction.name] = _in_memory(instruction.shape)
            called = instruction.called
            if instruction.kind == "while":
                total += (self._module.loops[instruction.name] or 1) * self._traffic(called["body"][0])
            elif instruction.kind == "conditional":
                total += max(self._traffic(branch) for branch in called["branches"])
            elif instruction.kind in ("call", "call-start"):
                total += self._traffic(called["to_apply"][0])
            elif instruction.kind in ("copy-start", "slice-start"):
                # A move between two memories: its result alone, once for each end that is not on the chip.
                total += _moved(instruction)
            elif instruction.kind not in hlo.NAMES and not instruction.kind.endswith("-done"):
                total += sizes[instruction.name] + sum(
                    sizes.get(operand, 0) for operand in set(instruction.operands))
        return total

    @property
    def unread_loops(self) -> list[str]:
        """Names of the loops of which is not known how often they run; they are counted once."""
        return [loop for loop, count in self._module.loops.items() if count is None]


class InTurn:
    """Programs that run one after the other, counted as one; arguments and names as of Program."""

    def __init__(self, programs: list[Program]):
        self._programs = programs

    @property
    def collectives(self) -> list[collectives.Collective]:
        return [one for program in self._programs for one in program.collectives]

    @property
    def flops(self) -> float:
        return sum(program.flops for program in self._programs)

    def expert_products(self) -> list[int]:
        return [size for program in self._programs for size in program.expert_products()]

    def memory_traffic(self) -> float:
        return sum(program.memory_traffic() for program in self._programs)

    def schedule(self, chip: Chip, network, defaults: list[str]) -> clock.Schedule:
        """`defaults`: of each program, as far as there are any."""
        return clock.in_turn([program.schedule(chip, network, default) for program, default in
                              zip(self._programs, defaults, strict=False)])

    @property
    def unread_loops(self) -> list[str]:
        return [loop for program in self._programs for loop in program.unread_loops]


def _in_memory(shape):
    return sum(array.bytes for array in hlo.arrays(shape) if not array.is_on_chip)


def _moved(instruction):
    """Of a "copy-start" (result, source) or "slice-start" ((sources), result): bytes read and written."""
    ends = hlo.arrays(instruction.shape)[:2]
    return min(end.bytes for end in ends) * sum(not end.is_on_chip for end in ends)
