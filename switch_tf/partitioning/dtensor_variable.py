"""A variable of the dtensor back end: pieces on the devices, which Keras reads and assigns as a whole on the host."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import context
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class DTensorVariable(dtensor.DVariable):
    """A weight or slot in the pieces of its `layout`.

    A function of the partitioner reads and assigns the pieces. Eager code reads the whole value, as a tensor or array
    of the host, and assigns such values. So do `save`, `save_weights` and `load_weights` of Keras. With several
    processes, all of them do this together.
    """

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host."""
        return whole(self.read_value())

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        if tf.inside_function():
            self.check_function()
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return tf.convert_to_tensor(_on_host(self.read_value()), dtype)

    def check_function(self) -> None:
        """Refuses a traced function that no partitioner cuts over the devices, which could not read the pieces."""
        current = context.current()
        if current.annotator is None and not current.is_lowered:
            raise Refusal(f"{self.name} lies in pieces on DTensor's devices, and only functions that the partitioner "
                          "compiles can read it; for Keras' `fit`, `evaluate` and `predict`, for `generate` and "
                          "`export`, save the weights with `save_weights` and load them into a model that was built "
                          "without this partitioner.")

    def assign(self, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().assign(self._in_pieces(value), *args, **kwargs)

    def assign_add(self, delta: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().assign_add(self._in_pieces(delta), *args, **kwargs)

    def assign_sub(self, delta: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(self._in_pieces(delta), *args, **kwargs)

    def _in_pieces(self, value):
        """Cuts a value of the host, in eager code."""
        if tf.inside_function():
            return value
        if isinstance(value, DTensorVariable):
            return value.read_value()
        if dtensor.is_dtensor(value):
            return value
        value = np.asarray(value, self.dtype.as_numpy_dtype)
        if value.shape != tuple(self.shape):
            raise Refusal(f"{self.name} has shape {tuple(self.shape)}, so a value of shape {value.shape} cannot be "
                          "assigned or added to it; give one of the same shape.")
        return pack(value, self.layout)


def pack(value: np.ndarray, sharding: dtensor.Layout) -> tf.Tensor:
    """Cuts a whole array of the host into the pieces of this process's devices."""
    with tf.device("CPU:0"):  # otherwise the first GPU would hold all pieces at once
        pieces = [tf.constant(value[index]) for index in slices(value.shape, sharding)]
    return dtensor.pack(pieces, sharding)


def whole(tensor: tf.Tensor) -> np.ndarray:
    """Joins the pieces of an eager DTensor on the host. All processes call it together."""
    sharding = dtensor.fetch_layout(tensor)
    if dtensor.num_clients() > 1:  # this process lacks the pieces of the others
        sharding = dtensor.Layout.replicated(sharding.mesh, tensor.shape.rank)
        tensor = dtensor.relayout(tensor, sharding)
    value = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype)
    for index, piece in zip(slices(value.shape, sharding), dtensor.unpack(tensor), strict=True):
        value[index] = piece
    return value


@tf.custom_gradient
def _on_host(tensor):
    """Returns an eager DTensor as a tensor of the host, and has a gradient tape lay out its gradient alike."""
    sharding = dtensor.fetch_layout(tensor)
    return tf.constant(whole(tensor)), lambda gradient: pack(gradient.numpy(), sharding)


def slices(shape: Sequence[int], sharding: dtensor.Layout) -> Iterator[tuple[slice, ...]]:
    """Yields the part of a whole array that each device of this process has."""
    mesh = sharding.mesh
    for location in mesh.local_device_locations():
        index = []
        for axis, size in zip(sharding.sharding_specs, shape, strict=True):
            length = size // (1 if axis == dtensor.UNSHARDED else mesh.dim_size(axis))
            first = 0 if axis == dtensor.UNSHARDED else location[axis] * length
            index.append(slice(first, first + length))
        yield tuple(index)
