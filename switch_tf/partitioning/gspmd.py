"""Sharding annotations for XLA. Its partitioner (GSPMD, arXiv 2105.04663) infers all other shardings."""

import math
from collections.abc import Collection, Sequence

import numpy as np
from keras import ops
from tensorflow.python.compiler.xla.experimental import xla_sharding  # it has no public name

from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.tensors import Tensor


class XlaAnnotator:
    """Annotator (`axes.Annotator`) of a program that XLA cuts over some axes of a mesh.

    Args:
        layout: Layout with its mesh complete.
        mesh_axes: Names of the mesh axes that the program is cut over. The other axes hold replicas of the program.
    """

    is_for_compiler = True

    def __init__(self, layout: Layout, mesh_axes: Collection[str]):
        self.layout = layout
        self._mesh = {axis: size for axis, size in layout.mesh.items() if axis in mesh_axes}

    def constrain(self, x: Tensor, axes: Sequence[str | None]) -> Tensor:
        return self._split(x, self.layout.spec(axes))

    def gather(self, value: Tensor, axes: Sequence[str | None]) -> Tensor:
        stored = self.layout.spec(axes, at_rest=True)
        if any(len(mesh_axes) > 1 for mesh_axes in stored):
            # Stored unfolded. Without this it would be gathered unfolded and then laid out again.
            value = self._split(value, stored)
        return self.constrain(value, axes)

    def scatter(self, gradient: Tensor, axes: Sequence[str | None]) -> Tensor:
        spec = self.layout.spec(axes, at_rest=True)
        order = _scattered_last(self.layout, gradient.shape, self.layout.spec(axes), spec)
        if order is None:
            return self._split(gradient, spec)
        turned = self._split(ops.transpose(gradient, order), [spec[place] for place in order])
        return ops.transpose(turned, np.argsort(order).tolist())

    def replicate(self, x: Tensor) -> Tensor:
        return self._split(x, ((),) * len(x.shape))

    def _split(self, x, spec):
        return sharding(spec, self._mesh).apply_to_tensor(x, use_sharding_op=True)


def _scattered_last(layout, shape, used, at_rest):
    """Returns an order of a gradient's dimensions that puts the scattered one last; None if the order can stay.

    TPUs scatter only the last dimension of a gradient with one expert a device, [1, d_ff, d_model]. Along d_ff they
    would sum the whole gradient on every device, and keep a piece of it (docs/notebook/tpu.md).
    """
    piece = layout.piece(shape, used)
    first = next((place for place, size in enumerate(piece) if size > 1), None)
    if first in (None, len(shape) - 1) or used[first] == at_rest[first] or not first:
        return None
    return [*(place for place in range(len(shape)) if place != first), first]


def sharding(spec: Sequence[Sequence[str]], mesh: dict[str, int]) -> xla_sharding.Sharding:
    """Converts a spec of `Layout.spec` to XLA's object: tiles along its mesh axes, copies along the others.

    Args:
        spec: Mesh axes that split each dimension. Axes that `mesh` lacks are ignored.
        mesh: Number of devices along each mesh axis. Devices are numbered row by row.
    """
    spec = [[axis for axis in axes if axis in mesh] for axes in spec]
    used = [axis for axes in spec for axis in axes]
    order = [list(mesh).index(axis) for axis in [*used, *(axis for axis in mesh if axis not in used)]]
    devices = np.arange(math.prod(mesh.values())).reshape(list(mesh.values())).transpose(order)
    tiles = [math.prod(mesh[axis] for axis in axes) for axes in spec]
    if len(used) == len(mesh):
        return xla_sharding.Sharding.tile(devices.reshape(tiles))
    return xla_sharding.Sharding.partial_tile(devices.reshape([*tiles, -1]))
