"""Pieces of variables in host memory, as a checkpoint stores them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Piece(NamedTuple):
    """A piece of a variable, or a whole one, that one process writes into a checkpoint.

    Attributes:
        path: Path of the variable.
        slice_text: Place of the piece in the stored variable, see `slice_text`.
        value: Its numbers in host memory, shared with nothing.
    """

    path: str
    slice_text: str
    value: tf.Tensor


def in_host_memory(array: np.ndarray) -> tf.Tensor:
    """Returns an array that nobody else changes as a tensor of the host. Some arrays share their memory with it."""
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def slice_text(shape: Sequence[int], index: Sequence[slice]) -> str:
    """Returns TensorFlow's text for a slice, "4 8 0,2:-" for the first half of [4, 8]; "" for the whole tensor."""
    ranges = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    if all(end - start == size for (start, end), size in zip(ranges, shape, strict=True)):
        return ""
    parts = ["-" if end - start == size else f"{start},{end - start}"
             for (start, end), size in zip(ranges, shape, strict=True)]
    return f"{' '.join(map(str, shape))} {':'.join(parts)}"
