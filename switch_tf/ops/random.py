"""Random numbers that depend only on the run's seed, the step, the layer and the element.

Each number is a hash of (seed, position in the global tensor), `lowbias32` (Ellis, "Prospecting for Hash Functions").
So they are equal for any layout and number of microbatches, resuming needs no state, and partitioners split the work,
unlike with Keras' Philox generator.
"""

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from switch_tf import context
from switch_tf.partitioning.axes import arange
from switch_tf.partitioning.tensors import Tensor

# Keras' TensorFlow back end imports it anyway.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from keras.src.random import seed_generator

# Any number: the run's seed and the layer's path distinguish streams.
_OPERATION_SEED = 20210111


def random_seed(seed: Any) -> AbstractContextManager:
    """Returns a scope in which layers draw from streams of `seed`, an int or integer scalar tensor.

    It applies to its thread: under `tf.distribute`, open it in each replica's function.
    """
    return context.within(seed=seed)


def step_seed(seed: int, step: Any) -> Tensor:
    """Returns the seed of a training step, a <uint32> scalar."""
    return _mix(_mix(_uint32(seed)) ^ _uint32(step))


def fresh_seed() -> Tensor:
    """Returns the seed of the context or else a new seed from Keras' global generator: <uint32> scalar.

    In a replica of a `tf.distribute` strategy TensorFlow draws it, equal in all replicas: a replica's thread cannot
    create the variables of Keras' generator. `keras.utils.set_random_seed` seeds both.
    """
    seed = context.current().seed
    if seed is not None:
        return _uint32(seed)
    if _replica_index() is not None:
        return tf.cast(tf.random.uniform((), 0, 2**31 - 1, tf.int32, seed=_OPERATION_SEED), tf.uint32)
    if keras.backend.backend() == "tensorflow":
        # A generator created inside a traced function would lose its value for good if the trace fails.
        with tf.init_scope():
            seed_generator.global_seed_generator()
    return ops.cast(keras.random.randint((), 0, 2**31 - 1), "uint32")


def _replica_index():
    if (keras.backend.backend() != "tensorflow" or not tf.distribute.has_strategy()
            or tf.distribute.in_cross_replica_context()):
        return None
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def layer_seed(layer: keras.layers.Layer, purpose: str) -> Tensor:
    """Returns the seed of one use of random numbers by a layer in this call: <uint32> scalar."""
    return _mix(fresh_seed() ^ _uint32(zlib.crc32(f"{layer.path}/{purpose}".encode())))


def uniform(seed: Tensor, shape: Sequence[Any]) -> Tensor:
    """Draws uniform numbers in [0, 1) with 24 random bits, <float32>[shape].

    Args:
        shape: ints or scalar tensors. The first axis, sequences or groups, is this part of the batch.
    """
    rows = ops.reshape(batch_positions(shape[0]), (-1,) + (1,) * (len(shape) - 1))
    position = _uint32(0)  # row-major index of every element
    for size in shape[1:]:
        position = ops.expand_dims(position * ops.cast(size, "uint32"), -1) + arange(size, "uint32")
    return uniform_at(seed, rows, ops.expand_dims(position, 0))


def uniform_at(seed: Tensor, batch_position: Tensor, position: Tensor) -> Tensor:
    """Draws uniform numbers in [0, 1) for single elements of a tensor, in any order, as <float32>.

    Args:
        batch_position: <int32>. Index of the sequence or group in the global batch.
        position: <int32 or uint32>. Index within it. Broadcasts with `batch_position`.
    """
    keys = _mix(_mix(_uint32(batch_position)) ^ seed)
    bits = _mix(_mix(_uint32(position) ^ keys) + seed)
    return ops.cast(ops.right_shift(bits, _uint32(8)), "float32") * 2.0**-24


def batch_positions(size: Any) -> Tensor:
    """Returns the places of this part's `size` sequences or groups in the global batch: <int32>[size]."""
    part = context.current().part
    # Replicas of Keras' `fit` are not parts (each groups its own tokens), but share a seed.
    place = part.index if part.count > 1 else _replica_index()
    index = arange(size)
    return index if place is None else index + ops.cast(place, "int32") * ops.cast(size, "int32")


def _mix(x):
    """lowbias32, a bijection of 32-bit integers. Each input bit flips each output bit with probability 1/2."""
    x = ops.bitwise_xor(x, ops.right_shift(x, _uint32(16))) * _uint32(0x7FEB352D)
    x = ops.bitwise_xor(x, ops.right_shift(x, _uint32(15))) * _uint32(0x846CA68B)
    return ops.bitwise_xor(x, ops.right_shift(x, _uint32(16)))


def _uint32(value):
    return ops.convert_to_tensor(value, "uint32") if isinstance(value, int) else ops.cast(value, "uint32")
