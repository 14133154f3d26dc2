"""The network between the chips of a pod: how far apart the members of a group are, and which links they can use."""

import itertools
from typing import NamedTuple

import numpy as np


class Network(NamedTuple):
    """A torus of chips and a mesh laid over it.

    `mesh`: mesh axis -> size; `places`: <int>[device, dimension], where in the torus each device of the mesh is, in
    row-major order of the mesh; `sizes`: chips along each dimension; `wraps`: whether the last is next to the first.
    """

    mesh: dict[str, int]
    places: np.ndarray
    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]

    @classmethod
    def of(cls, topology: str, mesh, coordinates):
        """The network of a topology such as "v5e:4x4"; `coordinates` are x, y, z of each device of the mesh.

        Chips in two dimensions wrap along a whole pod's 16, those in three along multiples of 4 (Cloud TPU's system
        architecture).
        """
        sizes = tuple(int(size) for size in topology.partition(":")[2].split("x"))
        wraps = tuple(size == 16 if len(sizes) == 2 else size % 4 == 0 for size in sizes)
        return cls(dict(mesh), np.array(coordinates)[:, :len(sizes)], sizes, wraps)

    def mean_hops(self, axes) -> float:
        """Links between two members of a group that differ in these mesh axes, on average over pairs; at least 1."""
        members = self._group(axes)
        distance = np.abs(members[:, None] - members[None])
        for dimension, (size, wraps) in enumerate(zip(self.sizes, self.wraps, strict=True)):
            if wraps:
                distance[..., dimension] = np.minimum(distance[..., dimension], size - distance[..., dimension])
        num_pairs = len(members) * (len(members) - 1)
        return max(1.0, distance.sum() / num_pairs) if num_pairs else 1.0

    def share_of_links(self, axes) -> float:
        """The part of each chip's links that lie along the dimensions in which such a group extends."""
        members = self._group(axes)
        return max(1, int(np.sum(members.max(0) > members.min(0)))) / len(self.sizes)

    def _group(self, axes):
        along = [range(size) if axis in axes else (0,) for axis, size in self.mesh.items()]
        indices = list(zip(*itertools.product(*along), strict=True))
        return self.places[np.ravel_multi_index(indices, tuple(self.mesh.values()))]
