"""Variables under DTensor, which splits a dimension over one mesh axis: one that lies over several is stored unfolded.

A kernel [512, 2048] whose second dimension lies over mesh axes of 2 and 4 devices is stored as [2, 512, 1024], the
first and the last dimension over one axis each: the pieces of a split over both. What is split off comes first, because
a TPU lays out the last two dimensions in tiles, of which a dimension of one between them would fill an eighth.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


class Unfolding(NamedTuple):
    """How a weight is stored: with dimensions of its own for all but the last mesh axis that splits one of its.

    `shape`: of the weight; `first`: those dimensions, which come first, as pairs of the weight's dimension and a size,
    the outermost of each first. None where the weight is stored as it is.
    """

    shape: tuple[int, ...]
    first: tuple[tuple[int, int], ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        rest = list(self.shape)
        for dim, size in self.first:
            rest[dim] //= size
        return (*(size for _, size in self.first), *rest)

    @property
    def _order(self):
        """The dimensions in which it is stored, each before that of the weight which it was split off."""
        places = [[] for _ in self.shape]
        for place, (dim, _) in enumerate(self.first):
            places[dim].append(place)
        return [place for dim, own in enumerate(places) for place in (*own, len(self.first) + dim)]

    def fold(self, stored, library=tf):
        """From the shape in which it is stored to that of the weight; `library`: tf or np."""
        return library.reshape(library.transpose(stored, self._order), self.shape)

    def unfold(self, whole, library=tf):
        """From the shape of the weight to that in which it is stored."""
        order, shape = self._order, self.stored_shape
        between = library.reshape(whole, [shape[place] for place in order])
        return library.transpose(between, np.argsort(order).tolist())


def unfolding(shape, spec, mesh: dict[str, int]) -> tuple[Unfolding, tuple[str | None, ...]]:
    """How a weight is stored, and the mesh axis or None that splits each dimension of that.

    Args:
        shape: of the weight.
        spec: for each dimension the mesh axes that split it, the outermost first; those of one device are left out.
        mesh: mesh axis -> devices along it.
    """
    first, last = [], []
    for dim, axes in enumerate(spec):
        axes = [axis for axis in axes if mesh[axis] > 1]
        first += [(dim, axis) for axis in axes[:-1]]
        last.append(axes[-1] if axes else None)
    return (Unfolding(tuple(shape), tuple((dim, mesh[axis]) for dim, axis in first)),
            (*(axis for _, axis in first), *last))


class UnfoldedVariable:
    """What Keras takes for a tf.Variable: is read and assigned as a weight, whose numbers `stored` holds.

    Args:
        stored: dtensor.DVariable, or a tf.Variable of a program that is only compiled. Gradients are taken to it, in
            its shape.
        unfolding: Unfolding, how they are stored.
        used: dtensor.Layout of the weight when it is used, over which DTensor folds and unfolds it; None where XLA's
            partitioner sees to that.
    """

    _should_act_as_resource_variable = True

    def __init__(self, stored, unfolding: Unfolding, used=None):
        self.stored, self.unfolding = stored, unfolding
        self.shape = tf.TensorShape(unfolding.shape)
        self.dtype, self.name, self.handle = stored.dtype, stored.name, stored.handle
        self._unique_id = stored._unique_id  # by which Keras' optimizers know it
        self._used = used

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
        return self.unfolding.fold(_laid_out(tensor, self._used and self._unfolded_layout()))

    def unfold(self, tensor):
        """From the shape of the weight to that in which it is stored, and to its layout."""
        whole = _laid_out(tensor, self._used)
        return _laid_out(self.unfolding.unfold(whole), getattr(self.stored, "layout", None))

    def _unfolded_layout(self):
        """The layout in which it is used of the shape in which it is stored: what was split off is whole."""
        specs = [dtensor.UNSHARDED] * len(self.unfolding.first) + self._used.sharding_specs
        return dtensor.Layout(specs, self._used.mesh)


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


def unfolding_of(variable) -> Unfolding:
    """How a Keras variable is stored."""
    value = variable.value
    return value.unfolding if isinstance(value, UnfoldedVariable) else Unfolding(tuple(variable.shape))


def assign(variable, value) -> None:
    """Assigns an array of numbers, which the host has whole, to a Keras variable, however that is stored."""
    target = stored(variable)
    value = np.asarray(value, target.dtype.as_numpy_dtype)
    if isinstance(target, dtensor.DVariable):
        target.assign(pack(unfolding_of(variable).unfold(value, np), target.layout))
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
        with tf.device("CPU:0"):  # or all pieces would be on the first GPU together, before each goes to its own
            pieces.append(tf.constant(value[tuple(index)]))
    return dtensor.pack(pieces, sharding)
