"""The collectives of an optimised program: what a chip sends in a step, over which axes of the mesh."""

import math
import re
from typing import NamedTuple

import numpy as np

from switch_tf.aot import hlo
from switch_tf.aot.attribution import layer, stacks_of

_COLLECTIVE = re.compile(
    r"(all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|ragged-all-to-all)(-start)?")
_SCATTER = "all-reduce-scatter"  # how computations begin that add up and keep a piece


class Collective(NamedTuple):
    """One collective: XLA's kind, bytes of its result on one chip, devices that take part, the mesh axes that they
    differ in, its largest shape, the layer (or "gradient of" one) that it comes from, how often a step runs it."""

    kind: str
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    shape: str
    where: str
    times: int = 1


def read(module: hlo.Module, mesh: dict[str, int]) -> dict[str, Collective]:
    """Every collective of a program, by the name of its instruction.

    Args:
        module: Module.
        mesh: dict, mesh axis -> size, in the order of its devices.
    """
    return _read(module, mesh)[0]


def carriers(module: hlo.Module, mesh: dict[str, int]) -> dict[str, str]:
    """Fusions that start a collective, carry it on beside what they compute, or wait for it: name -> the collective's.

    Arguments as for `read`, whose names the values are.
    """
    found, first = _read(module, mesh)
    return {fusion.name: inner.name if inner.name in found else first[_identity(inner)]
            for fusion, inner in _fused(module)}


def _fused(module):
    """Every fusion that a collective is written in, and that collective."""
    return [(fusion, inner) for instructions in module.computations.values() for fusion in instructions
            if fusion.kind == "fusion" for inner in module.computations.get(fusion.called["calls"][0], ())
            if _COLLECTIVE.fullmatch(inner.kind)]


def _read(module, mesh):
    """Collectives by name, and the names of those that run beside several other operations, by identity."""
    found, first = {}, {}
    fused, stacks = {inner.name for _, inner in _fused(module)}, stacks_of(module)
    for computation, instructions in module.computations.items():
        is_scatter = computation.startswith(_SCATTER)
        for instruction in instructions:
            match = _COLLECTIVE.fullmatch(instruction.kind)
            if match is None:
                continue
            if instruction.name in fused and not is_scatter:
                if _identity(instruction) in first:
                    continue
                first[_identity(instruction)] = instruction.name
            times = module.times.get(computation, 1)
            found[instruction.name] = _sent(instruction, match, mesh, is_scatter, times, stacks)
    return found, first


def _identity(instruction):
    """What a collective that is written with each operation that it runs beside has in common everywhere.

    The channel alone is not enough: all that the compiler made of several smaller ones have the same.
    """
    channel = re.search(r"channel_id=\d+", instruction.line)
    arrays = (array.text for array in hlo.arrays(instruction.shape))
    return (channel[0], instruction.kind, *arrays) if channel else instruction.name


def _sent(instruction, match, mesh, is_scatter, times, stacks):
    arrays = hlo.arrays(instruction.shape)
    kind = match[1]
    if match[2] and kind != "all-reduce":
        arrays = arrays[1:2]  # the start of an asynchronous one names its operand, too, and flags after its result
    size = sum(array.bytes for array in arrays)
    group, axes = _group(instruction.line, mesh)
    if is_scatter:
        kind, size = "reduce-scatter", size // group  # each chip keeps its own part of the sum
    largest = max(arrays, key=lambda array: array.bytes).text if arrays else ""
    return Collective(kind, size, group, axes, largest, layer(instruction.operation, stacks), times)


def _group(line, mesh):
    """Size of a collective's groups, and the mesh axes in which the members of one differ."""
    devices = _first_group(line)
    if devices is None:
        return math.prod(mesh.values()), tuple(mesh)
    places = np.array(np.unravel_index(devices, tuple(mesh.values())))
    return len(devices), tuple(axis for axis, along in zip(mesh, places, strict=True) if len(set(along)) > 1)


def _first_group(line):
    """Device numbers of the first group, in whichever of its three ways XLA writes it; None for all devices.

    Raises:
        ValueError: it is written in another way.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(device) for device in found[1].split(",")]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source = ([int(length) for length in text.split(",")] for text in found.group(1, 2))
        return _iota(source, found[3]).reshape(shape)[0].ravel().tolist()
    if found := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? *\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        devices = _device_ids(found[2], math.prod(sizes.values())).reshape(list(sizes.values()))
        keep = []
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]):
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
    if found := re.search(r"replica_groups=(?!\{\})\S+", line):
        raise ValueError(f"XLA's text of a collective has groups in words that are unknown here: {found[0]}")
    return None


def _device_ids(text, count):
    """Devices in the order of a mesh: all in their own where there is no text, "[128,2]T(1,0)", or a list of them."""
    if text is None:
        return np.arange(count)
    if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota([int(length) for length in found[1].split(",")], found[2])
    return np.array([int(device) for device in text.split(",")])


def _iota(lengths, order):
    """0, 1, .. of this shape, its dimensions in the order of a text such as "1,0", or None."""
    devices = np.arange(math.prod(lengths)).reshape(lengths)
    return devices.transpose([int(axis) for axis in order.split(",")]) if order else devices
