"""The mesh of JAX's devices, the same for a step that trains and for one that is only compiled."""

from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal


def device_mesh(layout: Layout, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a layout's mesh, in which neighbours are neighbours on the chips' network.

    Args:
        layout: Layout with its mesh complete.
        devices: As many devices as the mesh has.

    Raises:
        Refusal: The devices are of several TPU slices.
    """
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        raise Refusal(f"These {len(devices)} devices are of {len(slices)} TPU slices, and the mesh of a layout covers "
                      "one; start the processes of one slice alone.")
    placed = mesh_utils.create_device_mesh(
        tuple(layout.mesh.values()), devices=list(devices), allow_split_physical_axes=True)
    return Mesh(placed, tuple(layout.mesh), axis_types=(AxisType.Auto,) * len(layout.mesh))


def named_sharding(mesh: Mesh, spec: Sequence[Sequence[str]]) -> NamedSharding:
    """Converts a spec of `Layout.spec`; axes that the mesh lacks are left out."""
    return NamedSharding(mesh, PartitionSpec(
        *(tuple(axis for axis in axes if axis in mesh.shape) or None for axes in spec)))
