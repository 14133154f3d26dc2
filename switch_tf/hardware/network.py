"""The network between the chips of a pod, and how the groups of a collective share its links."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np


class Network(NamedTuple):
    """A torus of chips and a mesh laid over it.

    Attributes:
        mesh: Size of each mesh axis.
        places: <int>[device, dimension], the place in the torus of each device, in row-major order of the mesh.
        sizes: Number of chips along each dimension of the torus.
        wraps: Whether the last chip along each dimension is a neighbour of the first.
    """

    mesh: dict[str, int]
    places: np.ndarray
    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]

    @classmethod
    def of(cls, topology: str, mesh: dict[str, int], coordinates: Sequence[Sequence[int]]) -> "Network":
        """Returns the network of a topology.

        Two-dimensional pods wrap along a dimension of 16 chips. Three-dimensional ones wrap along all dimensions if
        each is a multiple of 4 (Cloud TPU's system architecture).

        Args:
            topology: Name such as "v5e:4x4".
            mesh: Size of each mesh axis.
            coordinates: x, y, z of each device of the mesh.
        """
        sizes = tuple(int(size) for size in topology.partition(":")[2].split("x"))
        are_cubes = all(size % 4 == 0 for size in sizes)
        wraps = tuple(size == 16 if len(sizes) == 2 else are_cubes for size in sizes)
        return cls(dict(mesh), np.array(coordinates)[:, :len(sizes)], sizes, wraps)

    def links_of_rings(self, axes: Collection[str]) -> float:
        """Returns the links, in one direction, that a chip has to itself while groups gather or sum around rings.

        Along a dimension there are two if the group closes a ring, and one on a line, because its ends have no second.
        Groups with members that are not neighbours cross each other, and share links.

        Args:
            axes: Mesh axes along which the members of a group differ.
        """
        links = 0.0
        for dimension, members in self._along(axes):
            step = (members[-1] - members[0]) / (len(members) - 1)
            is_closed = self.wraps[dimension] and step * len(members) == self.sizes[dimension]
            links += (2 if is_closed else 1) / step
        return links or 1.0

    def links_to_next(self, axes: Collection[str]) -> float:
        """Returns the links that a chip has to itself while each member of a group sends to the next one only."""
        return max((1 / (members[1] - members[0]) for _, members in self._along(axes)), default=1.0)

    def busiest_link(self, axes: Collection[str]) -> float:
        """Returns the bytes over the busiest link, in one direction, for each byte that a chip sends in an all-to-all.

        Each chip sends equally to every other chip of its group, on shortest paths.

        Args:
            axes: Mesh axes along which the members of a group differ.
        """
        groups = self._groups(axes)
        busiest = 0.0
        for dimension, size in enumerate(self.sizes):
            counts = np.stack([np.bincount(group, minlength=size) for group in groups[..., dimension]]).astype(float)
            # Between each two places of a line of chips, averaged over all lines.
            sent = counts.T @ counts / (max(1, groups.shape[1] - 1) * len(self.places) / size)
            busiest = max(busiest, self._busiest(sent, self.wraps[dimension]))
        return busiest or 1.0

    @staticmethod
    def _busiest(sent, wraps):
        size = len(sent)
        loads = np.zeros((2, size))  # of the link from each place up, and down
        for start, end in zip(*np.nonzero(sent), strict=True):
            hops = np.array([end - start, start - end])
            hops = np.where(hops < 0, size + hops if wraps else np.inf, hops)
            ways = np.flatnonzero(hops == hops.min())
            for way in ways if start != end else ():
                passed = (start + (1, -1)[way] * np.arange(int(hops[way]))) % size
                loads[way, passed] += sent[start, end] / len(ways)
        return float(loads.max())

    def _along(self, axes):
        """Yields (dimension, places of a group's members along it) for each dimension that the group spans."""
        members = self._groups(axes)[0]
        for dimension in range(len(self.sizes)):
            places = np.unique(members[:, dimension])
            if len(places) > 1:
                yield dimension, places

    def _groups(self, axes):
        """Returns the places of the members of all groups: <int>[group, member, dimension]."""
        names, sizes = list(self.mesh), tuple(self.mesh.values())
        order = [name for name in names if name not in axes] + [name for name in names if name in axes]
        places = self.places.reshape(*sizes, -1).transpose(*(names.index(name) for name in order), len(sizes))
        members = int(np.prod([self.mesh[name] for name in axes if name in self.mesh]))
        return places.reshape(-1, members, self.places.shape[-1])
