"""What a compiled step needs and sends, and how long it may take: memory, collectives, roofline."""

import math
import re
from typing import NamedTuple

import numpy as np

from switch_tf.partitioning.devices import TPU_GIB

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|ragged-all-to-all)(-start)?\(")


class Chip(NamedTuple):
    """One device of a topology: memory in bytes, bfloat16 FLOP/s, bytes/s of memory and, one way, of its links."""

    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float


# From Google Cloud's TPU pages; the links of v4 and v6e are sums over links that were not checked against a run.
CHIPS = {
    "v3": Chip(TPU_GIB["v3"] * 2**30, 61.5e12, 450e9, 82e9),
    "v4": Chip(TPU_GIB["v4"] * 2**30, 275e12, 1228e9, 135e9),
    "v5e": Chip(TPU_GIB["v5litepod"] * 2**30, 197e12, 819e9, 100e9),
    "v5p": Chip(TPU_GIB["v5p"] * 2**30, 459e12, 2765e9, 300e9),
    "v6e": Chip(TPU_GIB["v6e"] * 2**30, 918e12, 1640e9, 224e9)}


class Sent(NamedTuple):
    """One collective: XLA's kind, bytes of its result on one chip, devices that take part, the mesh axes that they
    differ in, the shape, and the layer (or "gradient of" one) that it comes from."""

    kind: str
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    shape: str
    where: str


def collectives(hlo: str, mesh: dict[str, int]) -> list[Sent]:
    """Every collective of an optimised program."""
    found = []
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        if match[3] and match[2] in ("all-gather", "collective-permute"):
            shapes = shapes[1:2]  # the first half of an asynchronous one names its operand, too
        size = sum(_BYTES.get(dtype, 4) * math.prod(int(length) for length in dims.split(",") if length)
                   for dtype, dims in shapes)
        group, axes = _group(line, mesh)
        operation = re.search(r'op_name="([^"]*)"', line)
        found.append(Sent(match[2], size, group, axes, f"{shapes[0][0]}[{shapes[0][1]}]" if shapes else "",
                          _where(operation[1] if operation else "")))
    return found


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
    layer = [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[stack:-1] if "jit(" not in part]
    return ("gradient of " if any("gradient_tape" in part or "ent_tape" in part for part in parts) else "") + "/".join(
        layer)


def link_bytes(sent) -> float:
    """Bytes that one chip must at least send in a step, rings going one way."""
    def wire(one):
        share = (one.group_size - 1) / one.group_size
        return {"all-reduce": 2 * share, "reduce-scatter": one.group_size - 1, "collective-permute": 1.0}.get(
            one.kind, share) * one.bytes

    return sum(map(wire, sent))


class Roofline(NamedTuple):
    """Seconds that a step takes at least in each part if nothing else limited it: a prediction, never measured.

    `memory` is an upper bound: the compiler counts what stays on the chip, too.
    """

    compute: float
    memory: float
    links: float

    @property
    def at_best(self) -> float:
        """All parts at the same time, memory at its best."""
        return max(self.compute, self.links)

    @property
    def in_turn(self) -> float:
        """Links after the rest."""
        return max(self.compute, self.memory) + self.links


def roofline(flops: float, bytes_accessed: float, sent_bytes: float, chip: Chip) -> Roofline:
    """Seconds by part, for one chip's share of a step."""
    return Roofline(flops / chip.flops, bytes_accessed / chip.memory_bandwidth, sent_bytes / chip.link_bandwidth)
