"""The network between the chips of a pod: which links the groups of a collective use, and how they share them."""

import re
from typing import NamedTuple

import numpy as np

from switch_tf.refusals import Refusal


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

        Chips in two dimensions wrap along a whole pod's 16; those in three along all dimensions if each is a multiple
        of 4 (Cloud TPU's system architecture).
        """
        sizes = tuple(int(size) for size in topology.partition(":")[2].split("x"))
        are_cubes = all(size % 4 == 0 for size in sizes)
        wraps = tuple(size == 16 if len(sizes) == 2 else are_cubes for size in sizes)
        return cls(dict(mesh), np.array(coordinates)[:, :len(sizes)], sizes, wraps)

    def links_of_rings(self, axes) -> float:
        """How many of its links, in one direction, a chip has to itself while all groups that differ in these mesh axes
        gather, or sum, around rings.

        Along a dimension that a group closes a ring in there are two, on a line one: its ends have no other. Groups
        whose members are not neighbours run through each other, and share.
        """
        links = 0.0
        for dimension, members in self._along(axes):
            step = (members[-1] - members[0]) / (len(members) - 1)
            is_closed = self.wraps[dimension] and step * len(members) == self.sizes[dimension]
            links += (2 if is_closed else 1) / step
        return links or 1.0

    def links_to_next(self, axes) -> float:
        """The same while each member sends to the next one alone."""
        return max((1 / (members[1] - members[0]) for _, members in self._along(axes)), default=1.0)

    def busiest_link(self, axes) -> float:
        """Bytes over the busiest link, in one direction, for each byte that a chip sends while all groups that differ
        in these mesh axes exchange, each chip with every other of its group alike, on shortest ways.
        """
        groups = self._groups(axes)
        busiest = 0.0
        for dimension, size in enumerate(self.sizes):
            counts = np.stack([np.bincount(group, minlength=size) for group in groups[..., dimension]]).astype(float)
            # Between each two places of a line of chips, on average over all lines.
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
        """(dimension, places of a group's members along it) for each in which it extends."""
        members = self._groups(axes)[0]
        for dimension in range(len(self.sizes)):
            places = np.unique(members[:, dimension])
            if len(places) > 1:
                yield dimension, places

    def _groups(self, axes):
        """<int>[group, member, dimension]: where the members of all groups are."""
        names, sizes = list(self.mesh), tuple(self.mesh.values())
        order = [name for name in names if name not in axes] + [name for name in names if name in axes]
        places = self.places.reshape(*sizes, -1).transpose(*(names.index(name) for name in order), len(sizes))
        members = int(np.prod([self.mesh[name] for name in axes if name in self.mesh]))
        return places.reshape(-1, members, self.places.shape[-1])


def check_topology(topology: str) -> None:
    """Refuses what does not read like the name of a topology, without asking libtpu.

    Raises:
        Refusal: with examples of names.
    """
    if not re.fullmatch(r"(v[0-9][a-z]*|tpu7x):(\d+(?:x\d+){1,2})", topology):
        raise Refusal(f"A topology reads like v5e:4x4, v6e:16x16, v5p:4x4x4 or v4:4x4x4, not {topology!r}.")
