"""A variable of the pjrt back end: a `jax.Array` on the devices, with a name in TensorFlow's programs."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tensorflow as tf

from switch_tf import context
from switch_tf.partitioning.pieces import in_host_memory, slice_text
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class PjrtVariable(tf.__internal__.tracking.Trackable):
    """A weight or slot that Keras reads and assigns like a tf.Variable, and that is stored in pieces on the devices.

    A function that TensorFlow traces reads and assigns `symbol`, which is an argument of the lowered program and has no
    numbers of its own. Outside of such functions the variable has the numbers of `array`. Eager code that reads it as a
    tensor, which a gradient tape may watch, leaves a copy of them in `symbol`.

    Args:
        symbol: tf.Variable in reserved memory.
        array: jax.Array with the numbers, laid out as it is stored.
    """

    _should_act_as_resource_variable = True

    def __init__(self, symbol: tf.Variable, array: jax.Array):
        self.symbol, self.array = symbol, array
        self.shape, self.dtype, self.name = symbol.shape, symbol.dtype, symbol.name
        self.handle, self.trainable = symbol.handle, symbol.trainable
        # Keras' optimizers identify it by the first, TensorFlow's checkpoints by the second.
        self._unique_id, self._shared_name = symbol._unique_id, symbol._shared_name
        self._copied = None  # the array that `symbol` has a copy of
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

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole value on the host. With several processes, all of them call this together.

        Raises:
            Refusal: A step that failed while it ran has left no value.
        """
        return self._whole(self.array)

    def _whole(self, array):
        if array.is_deleted():
            raise Refusal(f"{self.name} has no value since a step failed while it ran; restore a checkpoint.")
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        from jax.experimental import multihost_utils  # starts the devices

        return multihost_utils.process_allgather(array, tiled=True)

    def assign(self, value: Tensor) -> Any:
        """Assigns a tensor in a traced function, or a whole array of the host, the same in all processes.

        Raises:
            Refusal: The value has another shape.
        """
        if tf.inside_function():
            self._check_lowered()
            return self.symbol.assign(value)
        array = np.array(value, self.dtype.as_numpy_dtype)  # a copy: a CPU device may keep the caller's memory
        if array.shape != self.array.shape:
            raise Refusal(f"{self.name} has shape {self.array.shape}, so it cannot become {array.shape}.")
        self.array = put(array, self.array.sharding)
        return self

    def assign_add(self, value: Tensor) -> Any:
        if tf.inside_function():
            self._check_lowered()
            return self.symbol.assign_add(value)
        return self.assign(self.numpy() + np.asarray(value))

    def assign_sub(self, value: Tensor) -> Any:
        if tf.inside_function():
            self._check_lowered()
            return self.symbol.assign_sub(value)
        return self.assign(self.numpy() - np.asarray(value))

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())

    def _check_lowered(self):
        """Refuses a function that TensorFlow will run, in which `symbol` has no numbers."""
        if not context.current().is_lowered:
            raise Refusal("A function that TensorFlow runs cannot read or assign variables of the pjrt back end, which "
                          "JAX has; compile it with the partitioner, call the model eagerly, or build the model "
                          "without this partitioner for `fit` and `predict`.")

    def slices(self) -> list[str]:
        """Returns the slices on the devices of this process, as `slice_text` writes them, each once."""
        shape = self.array.shape
        indices = self.array.sharding.addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(slice_text(shape, index) for index in indices))

    def load(self, read: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        """Loads the numbers that the devices of this process hold, and reads each piece once.

        Args:
            read: Function of a slice of each dimension that returns its numbers.
        """
        shape, pieces = self.array.shape, {}

        def piece(index):
            text = slice_text(shape, index)
            if text not in pieces:
                pieces[text] = np.asarray(read(index), self.array.dtype)
            return pieces[text]

        self.array = jax.make_array_from_callback(shape, self.array.sharding, piece)

    def pieces(self) -> dict[str, tf.Tensor]:
        """Returns slice, as `slice_text` writes it -> copied numbers: each piece once, in the first process with it."""
        return {slice_text(self.array.shape, shard.index): in_host_memory(np.array(shard.data))
                for shard in self.array.addressable_shards if shard.replica_id == 0}

    def _serialize_to_tensors(self):
        """Returns the pieces for `tf.train.Checkpoint`, whose format knows slices of a tensor."""
        pieces = self.pieces()
        return {"VARIABLE_VALUE": pieces.get("", pieces)}


def put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Brings a whole array of the host to the devices, each process the pieces of its own ones."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
