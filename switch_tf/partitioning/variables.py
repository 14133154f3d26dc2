"""The variables of back ends, whole or in pieces, and their pieces in host memory.

DTensor splits a dimension over one mesh axis only, so a weight with a dimension over several is stored unfolded. A
kernel [512, 2048] with its second dimension over axes of 2 and 4 devices is stored as [2, 512, 1024], with its first
and last dimension over one axis each. New dimensions come first: a TPU lays out the last two in tiles, and a dimension
of one would fill an eighth of a tile.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import context
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class Piece(NamedTuple):
    """A variable, or a piece of it, that one process writes into a checkpoint.

    Attributes:
        slice_text: Place in the stored variable (`slice_text`).
        value: Its numbers in host memory, not shared.
    """

    path: str
    slice_text: str
    value: tf.Tensor


def host_tensor(array: np.ndarray) -> tf.Tensor:
    """Returns an array as a tensor of the host. They may share memory."""
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def slice_text(shape: Sequence[int], index: Sequence[slice]) -> str:
    """Returns TensorFlow's text for a slice, "4 8 0,2:-" for the first half of [4, 8]; "" for all."""
    parts = ["-" if end - start == size else f"{start},{end - start}"
             for (start, end, _), size in zip(map(slice.indices, index, shape), shape, strict=True)]
    return f"{' '.join(map(str, shape))} {':'.join(parts)}" if {*parts} - {"-"} else ""


class _Array:
    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)


class DTensorVariable(_Array, dtensor.DVariable):
    """A weight or slot in the pieces of its `layout`.

    The partitioner's functions use the pieces. Eager code and Keras' `save`, `save_weights` and `load_weights` use the
    whole value on the host, in all processes together.
    """

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host."""
        return whole(self.read_value())

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        if tf.inside_function():
            self.check_function()
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return tf.convert_to_tensor(_fetch(self.read_value()), dtype)

    def check_function(self) -> None:
        """Raises Refusal in a traced function that no partitioner cuts."""
        current = context.current()
        if current.annotator is None and not current.is_lowered:
            raise Refusal(f"{self.name} lies in pieces on DTensor's devices, and only functions that the partitioner "
                          "compiles can read it; for Keras' `fit`, `evaluate` and `predict`, for `generate` and "
                          "`export`, save the weights with `save_weights` and load them into a model that was built "
                          "without this partitioner.")

    def assign(self, value: Tensor, **options: Any) -> Any:
        return super().assign(self._cut(value), **options)

    def assign_add(self, delta: Tensor, **options: Any) -> Any:
        return super().assign_add(self._cut(delta), **options)

    def assign_sub(self, delta: Tensor, **options: Any) -> Any:
        return super().assign_sub(self._cut(delta), **options)

    def _cut(self, value):
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
    """Cuts a host array into the pieces of this process's devices."""
    with tf.device("CPU:0"):  # the first GPU would hold all pieces at once
        pieces = [tf.constant(value[index]) for index in slices(value.shape, sharding)]
    return dtensor.pack(pieces, sharding)


def whole(tensor: tf.Tensor) -> np.ndarray:
    """Joins an eager DTensor's pieces on the host, in all processes together."""
    sharding = dtensor.fetch_layout(tensor)
    if dtensor.num_clients() > 1:  # this process lacks some pieces
        sharding = dtensor.Layout.replicated(sharding.mesh, tensor.shape.rank)
        tensor = dtensor.relayout(tensor, sharding)
    value = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype)
    for index, piece in zip(slices(value.shape, sharding), dtensor.unpack(tensor), strict=True):
        value[index] = piece
    return value


@tf.custom_gradient
def _fetch(tensor):
    """Copies an eager DTensor to the host, and its gradient back into the layout."""
    sharding = dtensor.fetch_layout(tensor)
    return tf.constant(whole(tensor)), lambda gradient: pack(gradient.numpy(), sharding)


def slices(shape: Sequence[int], sharding: dtensor.Layout) -> Iterator[tuple[slice, ...]]:
    """Yields each local device's index into the whole array."""
    mesh = sharding.mesh
    for location in mesh.local_device_locations():
        index = []
        for axis, size in zip(sharding.sharding_specs, shape, strict=True):
            count, place = (1, 0) if axis == dtensor.UNSHARDED else (mesh.dim_size(axis), location[axis])
            index.append(slice(place * size // count, (place + 1) * size // count))
        yield tuple(index)


class Unfolding(NamedTuple):
    """The stored form of a weight. Of the mesh axes that split a dimension, all but the last become new dimensions.

    Attributes:
        first: The new dimensions, stored first: pairs of a dimension of the weight and a size, the outermost of each
            dimension first.
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
        """The stored dimensions, each new one before the dimension that it was split off."""
        places = [[] for _ in self.shape]
        for place, (dim, _) in enumerate(self.first):
            places[dim].append(place)
        return [place for dim, split_off in enumerate(places) for place in (*split_off, len(self.first) + dim)]

    def fold(self, stored: Any, library: Any = tf) -> Any:
        """Converts a stored tensor to the weight's shape. `library` is tf or np."""
        return library.reshape(library.transpose(stored, self._order), self.shape)

    def unfold(self, whole: Any, library: Any = tf) -> Any:
        """Converts a tensor of the weight's shape to the stored shape."""
        order, shape = self._order, self.stored_shape
        between = library.reshape(whole, [shape[place] for place in order])
        return library.transpose(between, np.argsort(order).tolist())


def unfolding(shape: Sequence[int], spec: Sequence[Sequence[str]], mesh: dict[str, int],
              ) -> tuple[Unfolding, tuple[str | None, ...]]:
    """Returns a weight's stored form, and the mesh axis or None that splits each stored dimension.

    Args:
        spec: Mesh axes that split each dimension, outermost first.
        mesh: Devices along each mesh axis.
    """
    first, last = [], []
    for dim, axes in enumerate(spec):
        axes = [axis for axis in axes if mesh[axis] > 1]
        first += [(dim, axis) for axis in axes[:-1]]
        last.append(axes[-1] if axes else None)
    return (Unfolding(tuple(shape), tuple((dim, mesh[axis]) for dim, axis in first)),
            (*(axis for _, axis in first), *last))


class UnfoldedVariable(_Array):
    """A weight stored unfolded, for Keras like a tf.Variable.

    Args:
        stored: Gradients have its shape.
        used: Layout in which DTensor folds and unfolds the weight.
    """

    _should_act_as_resource_variable = True

    def __init__(self, stored: DTensorVariable, unfolding: Unfolding, used: dtensor.Layout):
        self.stored, self.unfolding = stored, unfolding
        self.shape = tf.TensorShape(unfolding.shape)
        self.dtype, self.name, self.handle = stored.dtype, stored.name, stored.handle
        self._unique_id = stored._unique_id  # identifies it for Keras' optimizers
        self._used = used

    def __tf_tensor__(self, dtype=None, name=None):
        if not tf.inside_function():
            return tf.convert_to_tensor(self.unfolding.fold(tf.convert_to_tensor(self.stored)), dtype)
        self.stored.check_function()
        return tf.convert_to_tensor(self.fold(self.stored.read_value()), dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host."""
        return self.unfolding.fold(self.stored.numpy(), np)

    def assign(self, value: Tensor) -> Any:
        return self.stored.assign(self._unfold_value(value))

    def assign_add(self, value: Tensor) -> Any:
        return self.stored.assign_add(self._unfold_value(value))

    def assign_sub(self, value: Tensor) -> Any:
        return self.stored.assign_sub(self._unfold_value(value))

    def _unfold_value(self, value):
        if tf.inside_function() or dtensor.is_dtensor(value):
            return self.unfold(value)
        return self.unfolding.unfold(np.asarray(value), np)

    def fold(self, tensor: tf.Tensor) -> tf.Tensor:
        """Converts a stored tensor to the weight's shape."""
        specs = [dtensor.UNSHARDED] * len(self.unfolding.first) + self._used.sharding_specs
        return self.unfolding.fold(dtensor.relayout(tensor, dtensor.Layout(specs, self._used.mesh)))

    def unfold(self, tensor: tf.Tensor) -> tf.Tensor:
        """Converts a tensor of the weight's shape to the stored shape and layout."""
        whole = dtensor.relayout(tensor, self._used)
        return dtensor.relayout(self.unfolding.unfold(whole), self.stored.layout)


def fold_gradients(gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Converts gradients from the stored shapes to the weights' shapes."""
    return [variable.value.fold(gradient) if isinstance(variable.value, UnfoldedVariable) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)]


def stored(variable: keras.Variable) -> tf.Variable:
    """Returns the TensorFlow variable behind a Keras variable."""
    value = variable.value
    return value.stored if isinstance(value, UnfoldedVariable) else value


def unfolding_of(variable: keras.Variable) -> Unfolding:
    """Returns the stored form of a Keras variable."""
    value = variable.value
    return value.unfolding if isinstance(value, UnfoldedVariable) else Unfolding(tuple(variable.shape))


def assign(variable: keras.Variable, value: Any) -> None:
    """Assigns a whole host array to a Keras variable in any form."""
    target = variable.value
    target.assign(np.asarray(value, target.dtype.as_numpy_dtype))


class PjrtVariable(_Array, tf.__internal__.tracking.Trackable):
    """A weight or slot in pieces on the devices, for Keras like a tf.Variable.

    Functions traced by TensorFlow use `symbol`, an argument of the lowered program without numbers of its own.
    Elsewhere the variable has the numbers of `array`. Eager reads copy them to `symbol`, for gradient tapes.

    Args:
        symbol: tf.Variable in reserved memory.
        array: The numbers, laid out as stored.
    """

    _should_act_as_resource_variable = True

    def __init__(self, symbol: tf.Variable, array: jax.Array):
        self.symbol, self.array = symbol, array
        self.shape, self.dtype, self.name = symbol.shape, symbol.dtype, symbol.name
        self.handle, self.trainable = symbol.handle, symbol.trainable
        # Keras' optimizers identify it by the first, TensorFlow's checkpoints by the second.
        self._unique_id, self._shared_name = symbol._unique_id, symbol._shared_name
        self._copied = None  # the array copied to `symbol`
        self._copying = threading.Lock()

    def __tf_tensor__(self, dtype=None, name=None):
        if tf.inside_function():
            self._check_lowered()
            return tf.convert_to_tensor(self.symbol.read_value(), dtype)
        with self._copying:  # another thread may copy later numbers
            array = self.array
            if self._copied is not array:
                self.symbol.assign(self._whole(array))
                self._copied = array
            return tf.convert_to_tensor(self.symbol.read_value(), dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host, in all processes together."""
        return self._whole(self.array)

    def _whole(self, array):
        if array.is_deleted():
            raise Refusal(f"{self.name} has no value since a step failed while it ran; restore a checkpoint.")
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        from jax.experimental import multihost_utils  # starts the devices

        return multihost_utils.process_allgather(array, tiled=True)

    def assign(self, value: Tensor) -> Any:
        """Assigns a tensor in a traced function, or a host array that is equal in all processes."""
        return self._assign("assign", value)

    def assign_add(self, value: Tensor) -> Any:
        return self._assign("assign_add", value, np.add)

    def assign_sub(self, value: Tensor) -> Any:
        return self._assign("assign_sub", value, np.subtract)

    def _assign(self, method, value, combine=None):
        if tf.inside_function():
            self._check_lowered()
            return getattr(self.symbol, method)(value)
        if combine is not None:
            value = combine(self.numpy(), np.asarray(value))
        array = np.array(value, self.dtype.as_numpy_dtype)  # a copy: a CPU device may keep the caller's memory
        if array.shape != self.array.shape:
            raise Refusal(f"{self.name} has shape {self.array.shape}, so it cannot become {array.shape}.")
        self.array = put(array, self.array.sharding)
        return self

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())

    def _check_lowered(self):
        """Refuses functions that TensorFlow runs."""
        if not context.current().is_lowered:
            raise Refusal("A function that TensorFlow runs cannot read or assign variables of the pjrt back end, which "
                          "JAX has; compile it with the partitioner, call the model eagerly, or build the model "
                          "without this partitioner for `fit` and `predict`.")

    def slices(self) -> list[str]:
        """Returns the distinct slices on this process's devices (`slice_text`)."""
        shape = self.array.shape
        indices = self.array.sharding.addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(slice_text(shape, index) for index in indices))

    def load(self, read: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        """Loads this process's numbers, each piece once, by `read(one slice per dimension)`."""
        self.array = laid_out(self.array.shape, self.array.dtype, self.array.sharding, read)

    def pieces(self) -> dict[str, tf.Tensor]:
        """Returns slice text -> copied numbers, each piece from one process."""
        return {slice_text(self.array.shape, shard.index): host_tensor(np.array(shard.data))
                for shard in self.array.addressable_shards if shard.replica_id == 0}

    def _serialize_to_tensors(self):
        """Returns the pieces in the form of `tf.train.Checkpoint`."""
        pieces = self.pieces()
        return {"VARIABLE_VALUE": pieces.get("", pieces)}


def laid_out(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding,
             read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """Brings this process's pieces of an array to its devices, each read once and none longer in the host's memory."""
    pieces: dict[str, jax.Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        text = slice_text(shape, index)
        piece = pieces[text] if text in pieces else np.asarray(read(index), dtype)
        arrays.append(jax.device_put(piece, device))
        pieces[text] = arrays[-1]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Brings a host array to the devices, each process its own pieces."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
