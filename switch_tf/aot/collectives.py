"""Collectives of an optimised program: bytes that a chip sends in a step, and the mesh axes that they cross."""

import math
import re
from typing import NamedTuple

import numpy as np

from switch_tf.aot import hlo
from switch_tf.aot.attribution import layer, stacks_of

_COLLECTIVE = re.compile(
    r"(all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|ragged-all-to-all)(-start)?")
_SCATTER = "all-reduce-scatter"  # prefix of computations that sum and keep a piece


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: XLA's kind.
        bytes: Bytes of the result on one chip.
        group_size: Number of devices in a group.
        axes: Mesh axes along which the members of a group differ.
        shape: Text of the largest array.
        where: Layer, or "gradient of" a layer, that it serves.
        times: Number of runs in a step.
    """

    kind: str
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    shape: str
    where: str
    times: int = 1


def read(module: hlo.Module, mesh: dict[str, int]) -> dict[str, Collective]:
    """Returns every collective of a program by the name of its instruction.

    Args:
        module: Parsed program.
        mesh: Mesh axis -> size, in the order of its devices.
    """
    return _read(module, mesh)[0]


def carriers(module: hlo.Module, mesh: dict[str, int]) -> dict[str, str]:
    """Returns the fusions that start, continue or await a collective: fusion -> name of the collective in `read`.

    Args:
        module: Parsed program.
        mesh: Mesh axis -> size, in the order of its devices.
    """
    collectives, first_names = _read(module, mesh)
    return {fusion.name: inner.name if inner.name in collectives else first_names[_identity(inner)]
            for fusion, inner in _fused(module)}


def _fused(module):
    """Returns each fusion that contains a collective, with the collective."""
    return [(fusion, inner) for instructions in module.computations.values() for fusion in instructions
            if fusion.kind == "fusion" for inner in module.computations.get(fusion.called["calls"][0], ())
            if _COLLECTIVE.fullmatch(inner.kind)]


def _read(module, mesh):
    """Returns collectives by name, and the first name of each one that is written several times, by identity."""
    collectives, first_names = {}, {}
    fused, stacks = {inner.name for _, inner in _fused(module)}, stacks_of(module)
    ends = {instruction.operands[0]: instruction for instruction in module.instructions.values()
            if instruction.kind.endswith("-done")}
    for computation, instructions in module.computations.items():
        is_scatter = computation.startswith(_SCATTER)
        for instruction in instructions:
            match = _COLLECTIVE.fullmatch(instruction.kind)
            if match is None:
                continue
            if instruction.name in fused and not is_scatter:
                if _identity(instruction) in first_names:
                    continue
                first_names[_identity(instruction)] = instruction.name
            times = module.times.get(computation, 1)
            arrays = _results(instruction, match, ends)
            collectives[instruction.name] = _collective(instruction, match[1], arrays, mesh, is_scatter, times, stacks)
    return collectives, first_names


def _identity(instruction):
    """Returns a key shared by all copies of a collective. XLA writes one copy beside each operation that it overlaps.

    The channel alone is not enough: collectives that the compiler combined from smaller ones share a channel.
    """
    channel = re.search(r"channel_id=\d+", instruction.line)
    arrays = (array.text for array in hlo.arrays(instruction.shape))
    return (channel[0], instruction.kind, *arrays) if channel else instruction.name


def _results(instruction, match, ends):
    """Returns the arrays of a collective's result. An asynchronous one has its shape at its end."""
    if instruction.name in ends:
        return hlo.arrays(ends[instruction.name].shape)
    arrays = hlo.arrays(instruction.shape)
    # Without an end: a start lists its operand first, and flags after its result.
    return arrays[1:2] if match[2] and match[1] != "all-reduce" else arrays


def _collective(instruction, kind, arrays, mesh, is_scatter, times, stacks):
    size = sum(array.bytes for array in arrays)
    group, axes = _group(instruction.line, mesh)
    if is_scatter:
        kind, size = "reduce-scatter", size // group  # each chip keeps its own part of the sum
    largest = max(arrays, key=lambda array: array.bytes).text if arrays else ""
    return Collective(kind, size, group, axes, largest, layer(instruction.operation, stacks), times)


def _group(line, mesh):
    """Returns the group size of a collective, and the mesh axes along which the members of a group differ."""
    devices = _first_group(line)
    if devices is None:
        return math.prod(mesh.values()), tuple(mesh)
    places = np.array(np.unravel_index(devices, tuple(mesh.values())))
    return len(devices), tuple(axis for axis, along in zip(mesh, places, strict=True) if len(set(along)) > 1)


def _first_group(line):
    """Returns the device numbers of the first group, None for all devices. XLA has three notations.

    Raises:
        ValueError: The notation is unknown.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(device) for device in found[1].split(",")]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source = ([int(length) for length in text.split(",")] for text in found.group(1, 2))
        return _iota(source, found[3]).reshape(shape)[0].ravel().tolist()
    if found := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? *\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        devices = _device_ids(found[2], math.prod(sizes.values())).reshape(list(sizes.values()))
        selected = []
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]):
            dim = list(sizes).index(name)
            if size:  # a part of an axis, with `before` pieces to the left of it
                whole = sizes[name]
                selected.append((dim, [step * (whole // int(before) // int(size)) for step in range(int(size))]))
            else:
                selected.append((dim, list(range(sizes[name]))))
        index = [[0]] * devices.ndim
        for dim, along in selected:
            index[dim] = along
        return devices[np.ix_(*index)].ravel().tolist()
    if found := re.search(r"replica_groups=(?!\{\})\S+", line):
        raise ValueError(f"The groups of a collective are in an unknown notation of XLA: {found[0]}")
    return None


def _device_ids(text, count):
    """Parses devices in the order of a mesh: None (ascending), "[128,2]T(1,0)", or a list."""
    if text is None:
        return np.arange(count)
    if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota([int(length) for length in found[1].split(",")], found[2])
    return np.array([int(device) for device in text.split(",")])


def _iota(lengths, order):
    """Returns 0, 1, ... in this shape, transposed by a text such as "1,0" or by None."""
    devices = np.arange(math.prod(lengths)).reshape(lengths)
    return devices.transpose([int(axis) for axis in order.split(",")]) if order else devices
