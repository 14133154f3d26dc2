"""Reads the text of an optimised program: what a chip sends, multiplies, and reads and writes in its memory in a step.

A loop's body counts as often as it runs. Of a condition's branches the more costly one counts.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from switch_tf.aot import product_flops

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
_COLLECTIVE = re.compile(
    r"(all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|ragged-all-to-all)(-start)?")
# Memories on the chip: VMEM, and CMEM of v4.
_ON_CHIP = re.compile(r"S\([13]\)")
# Operations that name values and move none.
_NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))


class Sent(NamedTuple):
    """One collective: XLA's kind, bytes of its result on one chip, devices that take part, the mesh axes that they
    differ in, its largest shape, the layer (or "gradient of" one) that it comes from, how often a step runs it."""

    kind: str
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    shape: str
    where: str
    times: int = 1


class _Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    line: str


class Program:
    """An optimised program, parsed.

    Args:
        hlo: str, XLA's text of it.
        mesh: dict, mesh axis -> size, in the order of its devices.
    """

    def __init__(self, hlo: str, mesh: dict[str, int]):
        self._mesh = mesh
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = None
        current = []
        for line in hlo.splitlines():
            if header := re.match(r"(ENTRY )?%(\S+) \(", line):
                current = self._computations.setdefault(header[2], [])
                self._entry = header[2] if header[1] else self._entry
            elif found := re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(", line):
                current.append(_Instruction(found[1], found[2], found[3], line))

    @functools.cached_property
    def _instructions(self):
        """Every instruction by its name, of which XLA gives each only once."""
        return {instruction.name: instruction for instructions in self._computations.values()
                for instruction in instructions}

    @functools.cached_property
    def collectives(self) -> list[Sent]:
        """Every collective."""
        found, channels = [], set()
        for computation, instructions in self._computations.items():
            for instruction in instructions:
                match = _COLLECTIVE.fullmatch(instruction.kind)
                if match is None:
                    continue
                channel = re.search(r"channel_id=(\d+)", instruction.line)
                if channel and channel[1] in channels:
                    continue  # one that runs beside several other operations is written once with each
                channels.add(channel and channel[1])
                is_scatter = computation.startswith("all-reduce-scatter")
                found.append(_sent(instruction, match, self._mesh, is_scatter, self._times.get(computation, 1)))
        return found

    @functools.cached_property
    def flops(self) -> float:
        """Multiplications and additions of all matrix products."""
        return sum(self._times.get(computation, 0) * product_flops.count(
            product.line, _lengths(product.shape), lambda operand: _lengths(self._instructions[operand].shape))
            for computation, product in self._products())

    def expert_products(self) -> list[int]:
        """Numbers in the result of each matrix product of the experts, on one chip."""
        return [math.prod(_lengths(product.shape)) for _, product in self._products()
                if re.search(r'op_name="[^"]*/experts(_\d+)?/', product.line)]

    def _products(self):
        return [(computation, instruction) for computation, instructions in self._computations.items()
                for instruction in instructions if instruction.kind in ("convolution", "dot")]

    def memory_traffic(self) -> float:
        """Bytes that a chip reads from its memory and writes to it; what stays in its on-chip memory does not count.

        An operation that reads a part of an operand counts all of it.
        """
        return self._traffic(self._entry)

    def _traffic(self, computation):
        sizes, total = {}, 0.0
        for instruction in self._computations[computation]:
            sizes[instruction.name] = _in_memory(instruction.shape)
            called = _called(instruction)
            if instruction.kind == "while":
                total += (self._loops[instruction.name] or 1) * self._traffic(called["body"][0])
            elif instruction.kind == "conditional":
                total += max(self._traffic(branch) for branch in called["branches"])
            elif instruction.kind == "call":
                total += self._traffic(called["to_apply"][0])
            elif instruction.kind in ("copy-start", "slice-start"):
                # A move between two memories: its result alone, once for each end that is not on the chip.
                total += _moved(instruction)
            elif instruction.kind not in _NAMES and not instruction.kind.endswith("-done"):
                total += sizes[instruction.name] + sum(
                    sizes.get(operand, 0) for operand in set(_operands(instruction)))
        return total

    @property
    def unread_loops(self) -> list[str]:
        """Names of the loops of which is not known how often they run; they are counted once."""
        return [loop for loop, count in self._loops.items() if count is None]

    @functools.cached_property
    def _loops(self):
        """How often each loop runs, by name; None where it cannot be read."""
        return {name: self._count(instruction) for name, instruction in self._instructions.items()
                if instruction.kind == "while"}

    def _count(self, loop):
        """As it says itself, or from its counter, which goes from zero to a limit."""
        if found := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
            return int(found[1])
        called = _called(loop)
        condition, body = (_root(self._computations[called[role][0]]) for role in ("condition", "body"))
        if condition.kind != "compare" or "direction=LT" not in condition.line:
            return None
        counter, limit = (self._instructions[name] for name in _operands(condition))
        place = re.search(r"index=(\d+)", counter.line)
        step = place and self._instructions[_operands(body)[int(place[1])]]
        if not step or step.kind != "add":
            return None
        limit, *sizes = (_value(one) for one in (limit, *map(self._instructions.get, _operands(step))))
        size = next(filter(None, sizes), None)
        return math.ceil(limit / size) if limit and size else None

    @functools.cached_property
    def _times(self):
        """How often a step runs each computation."""
        times = {self._entry: 1}
        waiting = [self._entry]
        while waiting:
            caller = waiting.pop()
            for instruction in self._computations[caller]:
                count = self._loops.get(instruction.name) or 1
                for name in sum(_called(instruction).values(), []):
                    if name in self._computations and times.get(name, 0) < times[caller] * count:
                        times[name] = times[caller] * count
                        waiting.append(name)
        return times


def _called(instruction):
    """Names of the computations that an instruction runs, by role."""
    called = {}
    for role, name in re.findall(r"\b(body|condition|to_apply|calls)=%([\w.\-]+)", instruction.line):
        called.setdefault(role, []).append(name)
    if found := re.search(r"branch_computations=\{([^}]*)\}", instruction.line):
        called["branches"] = re.findall(r"%([\w.\-]+)", found[1])
    elif found := re.findall(r"\b(?:true|false)_computation=%([\w.\-]+)", instruction.line):
        called["branches"] = found
    return called


def _root(computation):
    return next(one for one in computation if one.line.lstrip().startswith("ROOT "))


def _operands(instruction):
    return re.findall(r"%([\w.\-]+)", instruction.line.partition(f" {instruction.kind}(")[2].partition(")")[0])


def _value(instruction):
    """What an integer constant is; None for anything else."""
    found = instruction and re.search(r" constant\((\d+)\)", instruction.line)
    return int(found[1]) if found else None


def _lengths(shape):
    return [int(length) for length in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if length]


def _arrays(shape):
    """(text, bytes, whether it lies on the chip) of every array in a shape's text."""
    return [(f"{dtype}[{dims}]", _BYTES[dtype] * math.prod(int(length) for length in dims.split(",") if length),
             _ON_CHIP.search(layout) is not None)
            for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape) if dtype in _BYTES]


def _in_memory(shape):
    return sum(size for _, size, is_on_chip in _arrays(shape) if not is_on_chip)


def _moved(instruction):
    """Of a "copy-start" (result, source) or "slice-start" ((sources), result): bytes read and written."""
    arrays = _arrays(instruction.shape)
    size = min(size for _, size, _ in arrays[:2])
    return size * sum(not is_on_chip for _, _, is_on_chip in arrays[:2])


def _sent(instruction, match, mesh, is_scatter, times):
    arrays = _arrays(instruction.shape)
    kind = match[1]
    if match[2] and kind in ("all-gather", "collective-permute"):
        arrays = arrays[1:2]  # the first half of an asynchronous one names its operand, too
    size = sum(size for _, size, _ in arrays)
    group, axes = _group(instruction.line, mesh)
    if is_scatter:
        kind, size = "reduce-scatter", size // group  # each chip keeps its own part of the sum
    largest = max(arrays, key=lambda array: array[1], default=("",))[0]
    operation = re.search(r'op_name="([^"]*)"', instruction.line)
    return Sent(kind, size, group, axes, largest, _where(operation[1] if operation else ""), times)


def _group(line, mesh):
    """Size of a collective's groups, and the mesh axes in which the members of one differ."""
    devices = _first_group(line)
    if devices is None:
        return math.prod(mesh.values()), tuple(mesh)
    places = np.array(np.unravel_index(devices, tuple(mesh.values())))
    return len(devices), tuple(axis for axis, along in zip(mesh, places, strict=True) if len(set(along)) > 1)


def _first_group(line):
    """Device numbers of the first group, in whichever of its three ways XLA writes it; None for all devices."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(device) for device in found[1].split(",")]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source = ([int(length) for length in text.split(",")] for text in found.group(1, 2))
        devices = np.arange(math.prod(source)).reshape(source)
        if found[3]:
            devices = devices.transpose([int(axis) for axis in found[3].split(",")])
        return devices.reshape(shape)[0].ravel().tolist()
    if found := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\([^)]*\))? *\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        keep = []
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[2]):
            dim = list(sizes).index(name)
            if size:  # a part of an axis: `before` pieces to the left of it
                whole = sizes[name]
                keep.append((dim, [step * (whole // int(before) // int(size)) for step in range(int(size))]))
            else:
                keep.append((dim, list(range(sizes[name]))))
        index = [[0]] * devices.ndim
        for dim, along in keep:
            index[dim] = along
        return devices[np.ix_(*index)].ravel().tolist()
    return None


def _where(name):
    """The layer in the name of an operation: "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of
    encoder/layers_1/mlp".
    """
    parts = [part for part in name.split("/") if part]
    stack = next((place for place, part in enumerate(parts)
                  if re.fullmatch(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?", part)), None)
    if stack is None:
        return "losses and update"
    # TensorFlow numbers names that it has seen before: layers_1_1, mlp_1.
    layer = [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[stack:-1]
             if not re.match(r"jit\(|einsum", part)]
    return ("gradient of " if any("gradient_tape" in part or "ent_tape" in part for part in parts) else "") + "/".join(
        layer)
