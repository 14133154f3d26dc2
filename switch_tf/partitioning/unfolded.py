"""Storage of variables under DTensor, which splits a dimension over one mesh axis only.

A weight with a dimension over several mesh axes is stored unfolded. A kernel [512, 2048] with its second dimension over
axes of 2 and 4 devices is stored as [2, 512, 1024], its first and last dimension over one axis each. New
dimensions come first, because a TPU lays out the last two dimensions in tiles: a dimension of one between them would
fill an eighth of a tile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf.partitioning.dtensor_variable import DTensorVariable
from switch_tf.partitioning.tensors import Tensor


class Unfolding(NamedTuple):
    """The stored form of a weight: a new dimension for every mesh axis but the last that splits one of its dimensions.

    Attributes:
        shape: Shape of the weight.
        first: New dimensions, which come first, as pairs of a dimension of the weight and a size, the outermost of each
            dimension first. Empty if the weight is stored as it is.
    """

    shape: tuple[int, ...]
    first: tuple[tuple[int, int], ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        rest = list(self.shape)
        for dim, size in self.first:
            rest[dim] //= size
        return (*(size for _, size in self.first), *rest)

    @property
    def _order(self):
        """The stored dimensions, each new one before the dimension of the weight that it was split off."""
        places = [[] for _ in self.shape]
        for place, (dim, _) in enumerate(self.first):
            places[dim].append(place)
        return [place for dim, split_off in enumerate(places) for place in (*split_off, len(self.first) + dim)]

    def fold(self, stored: Any, library: Any = tf) -> Any:
        """Returns a stored tensor in the shape of the weight. `library` is tf or np."""
        return library.reshape(library.transpose(stored, self._order), self.shape)

    def unfold(self, whole: Any, library: Any = tf) -> Any:
        """Returns a tensor of the weight's shape in the stored shape. `library` is tf or np."""
        order, shape = self._order, self.stored_shape
        between = library.reshape(whole, [shape[place] for place in order])
        return library.transpose(between, np.argsort(order).tolist())


def unfolding(shape: Sequence[int], spec: Sequence[Sequence[str]], mesh: dict[str, int],
              ) -> tuple[Unfolding, tuple[str | None, ...]]:
    """Returns the stored form of a weight, and the mesh axis or None that splits each stored dimension.

    Args:
        shape: Shape of the weight.
        spec: Mesh axes that split each dimension, the outermost first. Axes of one device are ignored.
        mesh: Number of devices along each mesh axis.
    """
    first, last = [], []
    for dim, axes in enumerate(spec):
        axes = [axis for axis in axes if mesh[axis] > 1]
        first += [(dim, axis) for axis in axes[:-1]]
        last.append(axes[-1] if axes else None)
    return (Unfolding(tuple(shape), tuple((dim, mesh[axis]) for dim, axis in first)),
            (*(axis for _, axis in first), *last))


class UnfoldedVariable:
    """A weight that Keras reads and assigns like a tf.Variable, and that is stored unfolded.

    Args:
        stored: dtensor.DVariable, or a tf.Variable of a program that is only compiled. Gradients have its shape.
        unfolding: Unfolding of the weight.
        used: dtensor.Layout in which DTensor folds and unfolds the weight. None if XLA's partitioner chooses it.
    """

    _should_act_as_resource_variable = True

    def __init__(self, stored: tf.Variable, unfolding: Unfolding, used: dtensor.Layout | None = None):
        self.stored, self.unfolding = stored, unfolding
        self.shape = tf.TensorShape(unfolding.shape)
        self.dtype, self.name, self.handle = stored.dtype, stored.name, stored.handle
        self._unique_id = stored._unique_id  # Keras' optimizers identify it by this
        self._used = used

    def __tf_tensor__(self, dtype=None, name=None):
        if not tf.inside_function():
            return tf.convert_to_tensor(self.unfolding.fold(tf.convert_to_tensor(self.stored)), dtype)
        if isinstance(self.stored, DTensorVariable):
            self.stored.check_function()
        return tf.convert_to_tensor(self.fold(self.stored.read_value()), dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host, see `DTensorVariable`."""
        return self.unfolding.fold(self.stored.numpy(), np)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Tensor) -> Any:
        return self.stored.assign(self._as_stored(value))

    def assign_add(self, value: Tensor) -> Any:
        return self.stored.assign_add(self._as_stored(value))

    def assign_sub(self, value: Tensor) -> Any:
        return self.stored.assign_sub(self._as_stored(value))

    def _as_stored(self, value):
        """Returns a tensor, or in eager code a value of the host, in the stored shape."""
        if tf.inside_function() or dtensor.is_dtensor(value):
            return self.unfold(value)
        return self.unfolding.unfold(np.asarray(value), np)

    def fold(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a stored tensor in the shape of the weight."""
        return self.unfolding.fold(_laid_out(tensor, self._used and self._unfolded_layout()))

    def unfold(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of the weight's shape in the stored shape and layout."""
        whole = _laid_out(tensor, self._used)
        return _laid_out(self.unfolding.unfold(whole), getattr(self.stored, "layout", None))

    def _unfolded_layout(self):
        """The layout of use, of a tensor in the stored shape: new dimensions are not split."""
        specs = [dtensor.UNSHARDED] * len(self.unfolding.first) + self._used.sharding_specs
        return dtensor.Layout(specs, self._used.mesh)


def _laid_out(tensor, layout):
    return tensor if layout is None else dtensor.relayout(tensor, layout)


def as_stored(gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns the gradients of variables in the shapes and layouts in which the variables are stored."""
    return [variable.value.unfold(gradient) if isinstance(variable.value, UnfoldedVariable) else
            _laid_out(gradient, getattr(variable.value, "layout", None))
            for gradient, variable in zip(gradients, variables, strict=True)]


def as_used(gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns gradients of `as_stored` in the shapes of the weights."""
    return [variable.value.fold(gradient) if isinstance(variable.value, UnfoldedVariable) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)]


def stored(variable: keras.Variable) -> tf.Variable:
    """Returns the TensorFlow variable behind a Keras variable, in the stored shape."""
    value = variable.value
    return value.stored if isinstance(value, UnfoldedVariable) else value


def unfolding_of(variable: keras.Variable) -> Unfolding:
    """Returns the stored form of a Keras variable."""
    value = variable.value
    return value.unfolding if isinstance(value, UnfoldedVariable) else Unfolding(tuple(variable.shape))


def assign(variable: keras.Variable, value: Any) -> None:
    """Assigns a whole array of the host to a Keras variable, in any stored form."""
    target = stored(variable)
    target.assign(unfolding_of(variable).unfold(np.asarray(value, target.dtype.as_numpy_dtype), np))
