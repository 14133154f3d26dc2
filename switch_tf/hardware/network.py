"""The networks between chips, a pod's torus or servers of GPUs, and the links that groups of a collective share.

A group's members differ along the mesh `axes`.
"""

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from switch_tf.hardware.chips import Gpu

Axes: TypeAlias = tuple[str, ...]


class _Mesh:
    """Places of devices, <int>[device, dimension], in a mesh's row-major order."""

    def __init__(self, mesh, places):
        self._mesh, self._places = mesh, np.array(places)

    def groups(self, axes: Axes) -> np.ndarray:
        """Returns all groups' places: <int>[group, member, dimension]."""
        inner = [place for place, axis in enumerate(self._mesh) if axis in axes]
        places = self._places.reshape(*self._mesh.values(), -1)
        members = math.prod(self._mesh[axis] for axis in axes)
        return np.moveaxis(places, inner, range(-1 - len(inner), -1)).reshape(-1, members, places.shape[-1])


class Network(_Mesh):
    """A torus of chips and a mesh laid over it.

    Two-dimensional pods wrap along dimensions of 16 chips, three-dimensional pods along all if each is a multiple of 4
    (Cloud TPU's system architecture).

    Args:
        topology: Name such as "v5e:4x4".
        coordinates: x, y, z of each device, in the mesh's row-major order.
    """

    def __init__(self, topology: str, mesh: dict[str, int], coordinates: Sequence[Sequence[int]]):
        self._sizes = [int(size) for size in topology.partition(":")[2].split("x")]
        are_cubes = all(size % 4 == 0 for size in self._sizes)
        self._wraps = [size == 16 if len(self._sizes) == 2 else are_cubes for size in self._sizes]
        super().__init__(mesh, [place[:len(self._sizes)] for place in coordinates])

    def links_of_rings(self, axes: Axes) -> float:
        """Returns a chip's own links, in one direction, while groups gather or sum around rings.

        A dimension has two if the group closes a ring, and one on a line: its ends have no second. Distant members
        share links.
        """
        links = 0.0
        for dimension, members in self._along(axes):
            step = (members[-1] - members[0]) / (len(members) - 1)
            is_closed = self._wraps[dimension] and step * len(members) == self._sizes[dimension]
            links += (2 if is_closed else 1) / step
        return links or 1.0

    def links_to_next(self, axes: Axes) -> float:
        """Returns a chip's own links while each member sends to the next."""
        return max((1 / (members[1] - members[0]) for _, members in self._along(axes)), default=1.0)

    @functools.cache  # noqa: B019 - a network lives as long as the process
    def busiest_link(self, axes: Axes) -> float:
        """Returns the bytes over the busiest link, in one direction, per byte that a chip sends in an all-to-all.

        Each chip sends equally to its group, on shortest paths.
        """
        groups = self.groups(axes)
        busiest = 0.0
        for dimension, size in enumerate(self._sizes):
            counts = np.stack([np.bincount(group, minlength=size) for group in groups[..., dimension]]).astype(float)
            # Between two places of a line, averaged over all lines.
            sent = counts.T @ counts / (max(1, groups.shape[1] - 1) * len(self._places) / size)
            loads = np.zeros((2, size))  # of the link up and down
            for start, end in zip(*np.nonzero(sent), strict=True):
                hops = np.array([end - start, start - end])
                hops = np.where(hops < 0, size + hops if self._wraps[dimension] else np.inf, hops)
                ways = np.flatnonzero(hops == hops.min())
                for way in ways if start != end else ():
                    passed = (start + (1, -1)[way] * np.arange(int(hops[way]))) % size
                    loads[way, passed] += sent[start, end] / len(ways)
            busiest = max(busiest, float(loads.max()))
        return busiest or 1.0

    def _along(self, axes):
        """Yields (dimension, places along it) for each dimension that a group spans."""
        members = self.groups(axes)[0]
        for dimension in range(len(self._sizes)):
            places = np.unique(members[:, dimension])
            if len(places) > 1:
                yield dimension, places


class Servers(_Mesh):
    """GPUs in servers and a mesh laid over them.

    In a server each GPU sends over all of its NVLinks, between servers over its own card.

    Args:
        servers: <int>[device], in the mesh's row-major order.
    """

    def __init__(self, gpu: Gpu, mesh: dict[str, int], servers: Sequence[int]):
        super().__init__(mesh, servers)
        self._slowness = gpu.link_bandwidth / gpu.network_bandwidth

    def links_of_rings(self, axes: Axes) -> float:
        """Returns the share of a GPU's NVLinks in use while groups gather or sum around rings.

        Between servers a group has a ring over each card.
        """
        members, together = self._group(axes)
        return 1.0 if together == members else min(1.0, together / self._slowness)

    def links_to_next(self, axes: Axes) -> float:
        """Returns the share of a GPU's NVLinks in use while each member sends to the next."""
        members, together = self._group(axes)
        return 1.0 if together == members else 1 / self._slowness

    def busiest_link(self, axes: Axes) -> float:
        """Returns the bytes over a GPU's NVLinks, or over its card in their equivalent, per byte of an all-to-all."""
        members, together = self._group(axes)
        return max(1.0, self._slowness * (members - together) / max(1, members - 1))

    def _group(self, axes):
        """Returns a group's size, and its members in one server."""
        servers = self.groups(axes)[0]
        return len(servers), int((servers == servers[0]).sum())
