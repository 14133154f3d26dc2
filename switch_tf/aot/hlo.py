"""Parser of XLA's text of an optimised program: instructions, in computations that call each other."""

import functools
import math
import re
from typing import NamedTuple

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
# Kinds of operations that only name values.
NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))
# The function through which JAX calls what TensorFlow wrote (`lowering.jit`).
_CALLER = re.compile(r"^jit\(step\)/call_exported(/|$)")
_CUBLAS = 'custom_call_target="__cublas'
# Memories on the chip: VMEM, and CMEM of v4.
_ON_CHIP = re.compile(r"S\([13]\)")


class Array(NamedTuple):
    """One array of a shape.

    Attributes:
        text: XLA's text of its shape, without the layout.
        bytes: Size.
        is_on_chip: Whether it is in on-chip memory.
    """

    text: str
    bytes: int
    is_on_chip: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: Unique name.
        shape: XLA's text of the result's shape.
        kind: Kind of operation, such as "fusion".
        line: Whole text.
    """

    name: str
    shape: str
    kind: str
    line: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.line.partition(f" {self.kind}(")[2].partition(")")[0])

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices; a fusion that contains a product does not count."""
        return self.kind in ("convolution", "dot") or self.kind == "custom-call" and _CUBLAS in self.line

    @property
    def written(self) -> str:
        """Text of the shape of what it leaves behind: `shape` without the scratch memory of cuBLAS."""
        return re.sub(r", s8\[\d+\]\{0\}\)$", ")", self.shape) if _CUBLAS in self.line else self.shape

    @property
    def called(self) -> dict[str, list[str]]:
        """Names of the called computations by role: "body", "condition", "to_apply", "calls", "branches"."""
        called = {}
        for role, name in re.findall(r"\b(body|condition|to_apply|calls)=%([\w.\-]+)", self.line):
            called.setdefault(role, []).append(name)
        if match := re.search(r"branch_computations=\{([^}]*)\}", self.line):
            called["branches"] = re.findall(r"%([\w.\-]+)", match[1])
        elif names := re.findall(r"\b(?:true|false)_computation=%([\w.\-]+)", self.line):
            called["branches"] = names
        return called

    @property
    def cycles(self) -> int | None:
        """Estimated cycles on the core, None without an estimate."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(match[1]) if match else None

    @property
    def operation(self) -> str:
        """TensorFlow's name of its operation, with scopes, or ""."""
        match = re.search(r'op_name="([^"]*)"', self.line)
        return re.sub(_CALLER, "", match[1]) if match else ""


class Module:
    """A parsed program.

    Attributes:
        computations: Name -> instructions in the order of the schedule.
        entry: Name of the computation that a step runs.
        instructions: Name -> instruction.
        loops: Name of a "while" -> number of its passes, None if it cannot be read.
        times: Name of a computation -> number of runs in a step. A loop that cannot be read counts once.
    """

    def __init__(self, hlo: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = None
        current = []
        for line in hlo.splitlines():
            if header := re.match(r"(ENTRY )?%(\S+) \(", line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif match := re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(", line):
                current.append(Instruction(match[1], match[2], match[3], line))
        self.instructions = {instruction.name: instruction for instructions in self.computations.values()
                             for instruction in instructions}

    @functools.cached_property
    def loops(self) -> dict[str, int | None]:
        return {name: self._count(instruction) for name, instruction in self.instructions.items()
                if instruction.kind == "while"}

    def _count(self, loop):
        """Reads the number of passes from the text, or from a counter that goes from zero to a limit."""
        if match := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
            return int(match[1])
        called = loop.called
        condition, body = (_root(self.computations[called[role][0]]) for role in ("condition", "body"))
        if condition.kind != "compare" or "direction=LT" not in condition.line:
            return None
        counter, limit = (self.instructions[name] for name in condition.operands)
        place = re.search(r"index=(\d+)", counter.line)
        step = place and self.instructions[body.operands[int(place[1])]]
        if not step or step.kind != "add":
            return None
        limit, *sizes = map(_value, (limit, *map(self.instructions.get, step.operands)))
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
    """Returns the dimensions of an array, or of the first array of a tuple."""
    return [int(length) for length in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if length]


def arrays(shape: str) -> list[Array]:
    """Returns every array in the text of a shape, which may be a tuple."""
    return [Array(f"{dtype}[{dims}]", _BYTES[dtype] * math.prod(int(length) for length in dims.split(",") if length),
                  _ON_CHIP.search(layout) is not None)
            for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape) if dtype in _BYTES]


def _root(computation):
    return next(instruction for instruction in computation if instruction.line.lstrip().startswith("ROOT "))


def _value(instruction):
    """Returns the value of an integer constant, None for other instructions."""
    match = instruction and re.search(r" constant\((\d+)\)", instruction.line)
    return int(match[1]) if match else None
