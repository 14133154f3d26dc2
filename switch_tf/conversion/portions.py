"""Weights in portions that fit into memory, such as some experts of a layer."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from switch_tf.conversion.weight_source import WeightSource

LARGEST = 2**28  # bytes of a portion in float32


class Portion(NamedTuple):
    """Rows of a weight, whose name it has. `size`: number of elements."""

    name: str
    rows: slice
    size: int


def groups_of(source: WeightSource, is_divisible: Callable[[str], bool] = lambda name: True) -> list[list[Portion]]:
    """Returns all weights in portions, in the order of reading and in groups of at most LARGEST bytes.

    Args:
        source: Weights.
        is_divisible: function(name) -> bool. Whether a weight may be cut along its first dimension. One that may not,
            or one of whose rows is larger than LARGEST, is a portion of any size.
    """
    groups, num_bytes = [[]], 0
    for name, weight in source.weights.items():
        for portion in _portions(name, weight.shape, is_divisible(name)):
            if groups[-1] and num_bytes + 4 * portion.size > LARGEST:
                groups.append([])
                num_bytes = 0
            groups[-1].append(portion)
            num_bytes += 4 * portion.size
    return groups


def _portions(name, shape, is_divisible):
    num_rows, row_size = shape[0], math.prod(shape[1:])
    step = max(1, LARGEST // max(1, 4 * row_size)) if is_divisible else num_rows
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        yield Portion(name, slice(start, stop), (stop - start) * row_size)


def read(source: WeightSource, group: list[Portion], bar: Any) -> Iterator[tuple[Portion, np.ndarray]]:
    """Yields the portions of a group and their values, one at a time, and advances a bar of `progress`."""
    for portion in group:
        yield portion, source.read(portion.name, portion.rows)
        bar.update(4 * portion.size)


def num_bytes(groups: list[list[Portion]]) -> int:
    """Counts the bytes of groups in float32."""
    return 4 * sum(portion.size for group in groups for portion in group)
