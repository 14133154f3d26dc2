"""Variables under DTensor, which splits a dimension over one mesh axis: one that lies over several is stored unfolded.

A kernel [512, 2048] whose second dimension lies over mesh axes of 2 and 4 devices is stored as [512, 2, 1024], the last
two dimensions over one axis each: the pieces are those of a split over both, and the numbers in the same order.
"""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


def unfolded(shape, spec, mesh: dict[str, int]):
    """The shape in which a weight is stored, and the mesh axis or None that splits each of its dimensions.

    Args:
        shape: of the weight.
        spec: for each dimension the mesh axes that split it, the outermost first; those of one device are left out.
        mesh: mesh axis -> devices along it.
    """
    dims = []
    for size, axes in zip(shape, spec, strict=True):
        axes = [axis for axis in axes if mesh[axis] > 1]
        for axis in axes[:-1]:
            dims.append((mesh[axis], axis))
            size //= mesh[axis]
        dims.append((size, axes[-1] if axes else None))
    return tuple(size for size, _ in dims), tuple(axis for _, axis in dims)


class UnfoldedVariable:
    """What Keras takes for a tf.Variable: is read and assigned as a weight, whose numbers `stored` holds.

    Args:
        stored: dtensor.DVariable, or a tf.Variable of a program that is only compiled. Gradients are taken to it, in
            its shape.
        shape: of the weight.
        folding: dtensor.Layout that leaves the dimensions to be folded whole, to which DTensor brings the value before;
            None where XLA's partitioner sees to it.
    """

    _should_act_as_resource_variable = True

    def __init__(self, stored, shape, folding=None):
        self.stored, self.shape = stored, tf.TensorShape(shape)
        self.dtype, self.name, self.handle = stored.dtype, stored.name, stored.handle
        self._unique_id = stored._unique_id  # by which Keras' optimizers know it
        self._folding = folding

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(self.fold(self.stored.read_value()), dtype)

    def assign(self, value):
        return self.stored.assign(self.unfold(value))

    def assign_add(self, value):
        return self.stored.assign_add(self.unfold(value))

    def assign_sub(self, value):
        return self.stored.assign_sub(self.unfold(value))

    def fold(self, tensor):
        """From the shape in which it is stored to that of the weight."""
        return tf.reshape(_laid_out(tensor, self._folding), self.shape)

    def unfold(self, tensor):
        """From the shape of the weight to that in which it is stored, and to its layout."""
        return _laid_out(tf.reshape(tensor, self.stored.shape), getattr(self.stored, "layout", None))


def _laid_out(tensor, layout):
    return tensor if layout is None else dtensor.relayout(tensor, layout)


def as_stored(gradients, variables) -> list:
    """Gradients of weights in the shapes and layouts in which those are stored.

    Args:
        gradients: list of tensors, one for each of `variables`.
        variables: list of Keras variables.
    """
    return [variable.value.unfold(gradient) if isinstance(variable.value, UnfoldedVariable) else
            _laid_out(gradient, getattr(variable.value, "layout", None))
            for gradient, variable in zip(gradients, variables, strict=True)]


def as_used(gradients, variables) -> list:
    """Back from `as_stored` to the shapes of the weights."""
    return [variable.value.fold(gradient) if isinstance(variable.value, UnfoldedVariable) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)]


def stored(variable) -> tf.Variable:
    """What holds the numbers of a Keras variable, in the shape in which they are stored."""
    value = variable.value
    return value.stored if isinstance(value, UnfoldedVariable) else value


def assign(variable, value) -> None:
    """Assigns an array of numbers, which the host has whole, to a Keras variable, however that is stored."""
    target = stored(variable)
    value = np.asarray(value, target.dtype.as_numpy_dtype)
    if isinstance(target, dtensor.DVariable):
        target.assign(pack(value.reshape(target.shape), target.layout))
    else:
        target.assign(value)


def pack(value: np.ndarray, sharding: dtensor.Layout):
    """Cuts a value that the host has whole: each process hands its own devices their pieces."""
    mesh, pieces = sharding.mesh, []
    for location in mesh.local_device_locations():
        index = []
        for axis, size in zip(sharding.sharding_specs, value.shape, strict=True):
            length = size // (1 if axis == dtensor.UNSHARDED else mesh.dim_size(axis))
            first = 0 if axis == dtensor.UNSHARDED else location[axis] * length
            index.append(slice(first, first + length))
        pieces.append(tf.constant(value[tuple(index)]))
    return dtensor.pack(pieces, sharding)
