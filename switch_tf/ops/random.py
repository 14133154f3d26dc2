"""Random numbers that depend only on the run's seed, the step, the layer and the element, and initial weights.

Each number is a hash of (seed, position in the global tensor), `lowbias32` (Ellis, "Prospecting for Hash Functions").
So they are equal for any layout and number of microbatches, resuming needs no state, and partitioners split the work,
unlike with Keras' Philox generator.
"""

import concurrent.futures
import math
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import scipy.special
from keras import ops

from switch_tf import context
from switch_tf.hardware.devices import IS_TENSORFLOW
from switch_tf.partitioning.axes import arange
from switch_tf.partitioning.tensors import Tensor

# Keras' TensorFlow back end imports it anyway.
if IS_TENSORFLOW:
    import tensorflow as tf
    from keras.src.random import seed_generator

# Any number: the run's seed and the layer's path distinguish streams.
_OPERATION_SEED = 20210111
_BLOCK = 2**18  # numbers drawn at a time, for a cache


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
    if IS_TENSORFLOW:
        # A generator created inside a traced function would lose its value for good if the trace fails.
        with tf.init_scope():
            seed_generator.global_seed_generator()
    return ops.cast(keras.random.randint((), 0, 2**31 - 1), "uint32")


def _replica_index():
    if not IS_TENSORFLOW or not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
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
    bits = _bits(seed, _uint32(batch_position), _uint32(position))
    return ops.cast(ops.right_shift(bits, _uint32(8)), "float32") * 2.0**-24


def _bits(seed, row, position, library=ops):
    keys = _mix(_mix(row, library) ^ seed, library)
    return _mix(_mix(position ^ keys, library) + seed, library)


def batch_positions(size: Any) -> Tensor:
    """Returns the places of this part's `size` sequences or groups in the global batch: <int32>[size]."""
    part = context.current().part
    # Replicas of Keras' `fit` are not parts (each groups its own tokens), but share a seed.
    place = part.index if part.count > 1 else _replica_index()
    index = arange(size)
    return index if place is None else index + ops.cast(place, "int32") * ops.cast(size, "int32")


def _mix(x, library=ops):
    """lowbias32, a bijection of 32-bit integers. Each input bit flips each output bit with probability 1/2.

    Args:
        library: `keras.ops`, or NumPy.
    """
    uint32 = np.uint32 if library is np else _uint32
    x = (x ^ library.right_shift(x, uint32(16))) * uint32(0x7FEB352D)
    x = (x ^ library.right_shift(x, uint32(15))) * uint32(0x846CA68B)
    return x ^ library.right_shift(x, uint32(16))


def _uint32(value):
    return ops.convert_to_tensor(value, "uint32") if isinstance(value, int) else ops.cast(value, "uint32")


class RandomByPosition(keras.initializers.Initializer):
    """Initial weights, each a hash of the seed and its position, so that each process draws its own piece of a weight.

    Args:
        distribution: "normal", "truncated_normal" or "uniform".
        scale: Above 0. Standard deviation, before the truncation at two of them, or largest magnitude.
        seed: Defaults to a draw from Python's generator, which `keras.utils.set_random_seed` seeds.
    """

    def __init__(self, distribution: str, scale: float, seed: int | None = None):
        self.distribution, self.scale, self.seed = distribution, scale, seed
        self._seed = np.uint32(random.randint(1, 10**9) if seed is None else seed % 2**32)

    def get_config(self) -> dict[str, Any]:
        return {"distribution": self.distribution, "scale": self.scale, "seed": self.seed}

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        if (instead := context.current().initial) is not None:
            return instead(self, tuple(shape))
        return ops.convert_to_tensor(self.piece(shape, (slice(None),) * len(shape)), dtype)

    def piece(self, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        """Draws one piece, <float32>, of a weight of this shape. The CPU's cores share the blocks."""
        ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        sizes = [end - first for first, end in ranges]
        if not context.current().draws_weights:
            return np.zeros(sizes, np.float32)
        numbers = np.empty(sizes, np.float32)

        def draw(block):
            numbers[tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(
                block, ranges, strict=True))] = self._draw(shape, block)

        if numbers.size <= _BLOCK:
            draw(ranges)
        else:
            with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                list(threads.map(draw, _blocks(ranges)))
        return numbers

    def _draw(self, shape, block):
        row, position = (np.zeros((1,) * len(shape), np.uint32) for _ in range(2))
        for axis, (first, end) in enumerate(block):
            places = np.arange(first, end, dtype=np.uint32).reshape((-1,) + (1,) * (len(shape) - axis - 1))
            row, position = (places, position) if axis == 0 else (row, position * np.uint32(shape[axis]) + places)
        bits = _bits(self._seed, row, position, np) >> np.uint32(8)
        # Odd multiples of 2^-24 between -1 and 1, which float32 holds exactly.
        numbers = (2 * bits.astype(np.int32) + (1 - 2**24)).astype(np.float32) * np.float32(2**-24)
        if self.distribution != "uniform":
            if self.distribution == "truncated_normal":
                numbers *= np.float32(math.erf(math.sqrt(2)))  # the share within two standard deviations
            numbers = scipy.special.erfinv(numbers) * np.float32(math.sqrt(2))  # TensorFlow's depends on the place
        return numbers * np.float32(self.scale)


def _blocks(ranges) -> Iterator[list[tuple[int, int]]]:
    """Cuts ranges of indices in halves, along the longest, to blocks that fit into a cache."""
    sizes = [end - first for first, end in ranges]
    if math.prod(sizes) <= _BLOCK:
        yield ranges
        return
    axis = int(np.argmax(sizes))
    first, end = ranges[axis]
    for half in ((first, (first + end) // 2), ((first + end) // 2, end)):
        yield from _blocks([*ranges[:axis], half, *ranges[axis + 1:]])
