"""A layout: the shape of the device mesh and which mesh axis splits each logical axis."""

import dataclasses
import math

from switch_tf.partitioning.axes import LOGICAL_AXES


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is cut over devices. The files of `gin/layouts/` bind it; without one a run uses one device.

    Args:
        mesh_shape: str, such as "data=1": names of mesh axes and their sizes in devices, separated by commas.
        rules: pairs (logical axis, mesh axis). Logical axes without a rule are not split.

    Raises:
        ValueError: a mesh that cannot be read, an unknown axis, or more devices than this version can use.
    """

    mesh_shape: str = "data=1"
    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for logical, mesh in self.rules:
            if logical not in LOGICAL_AXES:
                raise ValueError(f"The layout splits the unknown logical axis {logical!r}; "
                                 f"the axes are {sorted(LOGICAL_AXES)}.")
            if mesh not in self.mesh:
                raise ValueError(f"The layout puts {logical!r} on mesh axis {mesh!r}, which MESH_SHAPE "
                                 f"{self.mesh_shape!r} does not have; add it, for example \"{mesh}=1\".")
        if self.num_devices != 1:
            raise ValueError(f"MESH_SHAPE {self.mesh_shape!r} asks for {self.num_devices} devices; this version trains "
                             "on one, so use gin/layouts/single.gin.")

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> number of devices along it."""
        mesh = {}
        for entry in self.mesh_shape.split(","):
            name, _, size = entry.strip().partition("=")
            if not name or not size.isdigit() or int(size) < 1 or name in mesh:
                raise ValueError(f"MESH_SHAPE must read like \"data=4,model=2\", each axis once, not "
                                 f"{self.mesh_shape!r}.")
            mesh[name] = int(size)
        return mesh

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())
