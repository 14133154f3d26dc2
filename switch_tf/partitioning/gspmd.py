"""XLA's sharding annotations: the partitioner of the compiler (GSPMD, arXiv 2105.04663) infers the rest."""

import numpy as np
from tensorflow.python.compiler.xla.experimental import xla_sharding  # TensorFlow has no public name for it

from switch_tf.partitioning.layout import Layout


class XlaAnnotator:
    """Annotates tensors of a program that XLA compiles for the devices of some axes of a mesh.

    Args:
        layout: Layout with its mesh complete.
        mesh_axes: names of the mesh axes that the program is cut over; the others are other replicas.
    """

    is_for_compiler = True

    def __init__(self, layout: Layout, mesh_axes):
        self.layout = layout
        self._axes = tuple(axis for axis in layout.mesh if axis in mesh_axes)
        shape = [layout.mesh[axis] for axis in self._axes]
        self._devices = np.arange(int(np.prod(shape))).reshape(shape)

    def constrain(self, x, axes):
        return self._split(x, self.layout.spec(axes))

    def gather(self, value, axes):
        return self.constrain(value, axes)

    def scatter(self, gradient, axes):
        return self._split(gradient, self.layout.spec(axes, at_rest=True))

    def replicate(self, x):
        return self._split(x, (None,) * len(x.shape))

    def _split(self, x, spec):
        dims = [self._axes.index(axis) if axis in self._axes else -1 for axis in spec]
        return xla_sharding.mesh_split(x, self._devices, dims, use_sharding_op=True)
