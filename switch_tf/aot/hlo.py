"""The text of an optimised program as XLA writes it: instructions, in computations that call each other.

A loop's body counts as often as it runs.
"""

import functools
import math
import re
from typing import NamedTuple

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
# Kinds of operations that name values and do nothing.
NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))
# Memories on the chip: VMEM, and CMEM of v4.
_ON_CHIP = re.compile(r"S\([13]\)")


class Array(NamedTuple):
    """One array of a shape: its text without the layout, bytes, and whether it lies in a memory on the chip."""

    text: str
    bytes: int
    is_on_chip: bool


class Instruction(NamedTuple):
    """`name`; `shape`: XLA's text of its result; `kind`: of operation, such as "fusion"; `line`: all that is written.
    """

    name: str
    shape: str
    kind: str
    line: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it takes."""
        return re.findall(r"%([\w.\-]+)", self.line.partition(f" {self.kind}(")[2].partition(")")[0])

    @property
    def called(self) -> dict[str, list[str]]:
        """Names of the computations that it runs, by role: "body", "condition", "to_apply", "calls", "branches"."""
        called = {}
        for role, name in re.findall(r"\b(body|condition|to_apply|calls)=%([\w.\-]+)", self.line):
            called.setdefault(role, []).append(name)
        if found := re.search(r"branch_computations=\{([^}]*)\}", self.line):
            called["branches"] = re.findall(r"%([\w.\-]+)", found[1])
        elif found := re.findall(r"\b(?:true|false)_computation=%([\w.\-]+)", self.line):
            called["branches"] = found
        return called

    @property
    def cycles(self) -> int | None:
        """What the compiler expects it to take on the core; None where it does not say."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else None

    @property
    def operation(self) -> str:
        """TensorFlow's name of the operation that it comes from, with its scopes; "" where it has none."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""


class Module:
    """A program.

    Attributes:
        computations: name -> its instructions, in the order in which they are written: the schedule.
        entry: name of the computation that a step runs.
        instructions: name -> instruction; XLA gives each name only once.
        loops: name of a "while" -> how often it runs; None where that cannot be read.
        times: name of a computation -> how often a step runs it; a loop that cannot be read counts once.
    """

    def __init__(self, hlo: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = None
        current = []
        for line in hlo.splitlines():
            if header := re.match(r"(ENTRY )?%(\S+) \(", line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif found := re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(", line):
                current.append(Instruction(found[1], found[2], found[3], line))
        self.instructions = {instruction.name: instruction for instructions in self.computations.values()
                             for instruction in instructions}

    @functools.cached_property
    def loops(self) -> dict[str, int | None]:
        return {name: self._count(instruction) for name, instruction in self.instructions.items()
                if instruction.kind == "while"}

    def _count(self, loop):
        """As it says itself, or from its counter, which goes from zero to a limit."""
        if found := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
            return int(found[1])
        called = loop.called
        condition, body = (_root(self.computations[called[role][0]]) for role in ("condition", "body"))
        if condition.kind != "compare" or "direction=LT" not in condition.line:
            return None
        counter, limit = (self.instructions[name] for name in condition.operands)
        place = re.search(r"index=(\d+)", counter.line)
        step = place and self.instructions[body.operands[int(place[1])]]
        if not step or step.kind != "add":
            return None
        limit, *sizes = (_value(one) for one in (limit, *map(self.instructions.get, step.operands)))
        size = next(filter(None, sizes), None)
        return math.ceil(limit / size) if limit and size else None

    @functools.cached_property
    def times(self) -> dict[str, int]:
        times = {self.entry: 1}
        waiting = [self.entry]
        while waiting:
            caller = waiting.pop()
            for instruction in self.computations[caller]:
                count = self.loops.get(instruction.name) or 1
                for name in sum(instruction.called.values(), []):
                    if name in self.computations and times.get(name, 0) < times[caller] * count:
                        times[name] = times[caller] * count
                        waiting.append(name)
        return times


def lengths(shape: str) -> list[int]:
    """Lengths of the dimensions of an array, or of the first of several."""
    return [int(length) for length in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if length]


def arrays(shape: str) -> list[Array]:
    """Every array in a shape's text, which may be a tuple's."""
    return [Array(f"{dtype}[{dims}]", _BYTES[dtype] * math.prod(int(length) for length in dims.split(",") if length),
                  _ON_CHIP.search(layout) is not None)
            for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape) if dtype in _BYTES]


def _root(computation):
    return next(one for one in computation if one.line.lstrip().startswith("ROOT "))


def _value(instruction):
    """What an integer constant is; None for anything else."""
    found = instruction and re.search(r" constant\((\d+)\)", instruction.line)
    return int(found[1]) if found else None
