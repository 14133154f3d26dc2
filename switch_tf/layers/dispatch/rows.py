"""Rows moved by index, with gradients that are moves by index too."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Tensor

# Gathers rows by index.
Read = Callable[[Tensor, Tensor], Tensor]


class RowMaps(NamedTuple):
    """Maps between the choices of tokens and the rows of a buffer.

    On the kept choices the maps are inverse, so the gradient of a gather by one is a gather by the other: no rows are
    scattered.

    `row_of_choice`: <int32>[token, choice]. Number of rows for a choice without a row.
    `choice_of_row`: <int32>[row], token * choices + choice. Number of choices for an empty row.
    `token_of_row`: <int32>[row]. Number of tokens for an empty row.
    """

    row_of_choice: Any
    choice_of_row: Any
    token_of_row: Any


def row_maps(is_filled: Tensor, row: Tensor, num_rows: int | Tensor) -> RowMaps:
    """Returns the maps of a buffer.

    Args:
        is_filled: <bool>[group, tokens, choice]. Whether the choice has a row.
        row: <int32>[group, tokens, choice]. Its row.
        num_rows: int or int32 scalar tensor. Rows of the buffer.
    """
    num_groups, group_tokens, num_choices = ops.shape(row)
    all_choices = num_groups * group_tokens * num_choices
    row = ops.where(is_filled, row, num_rows)
    # The only scatter, of integers: the number of the choice that fills each row, counted from 1.
    filled = ops.scatter(ops.reshape(row, (-1, 1)), ops.arange(1, all_choices + 1, dtype="int32"),
                         (num_rows + 1,))[:num_rows]
    choice_of_row = ops.where(filled > 0, filled - 1, all_choices)
    return RowMaps(ops.reshape(row, (-1, num_choices)), choice_of_row, choice_of_row // num_choices)


def fill(tokens: Tensor, maps: RowMaps, read: Read) -> Tensor:
    """Copies tokens to rows: [group, tokens, d_model] -> [row, d_model].

    Args:
        tokens: tensor.
        maps: RowMaps.
        read: Function of rows and indices that gathers, such as `read_or_zero`.
    """
    rows = ops.reshape(tokens, (-1, tokens.shape[-1]))
    back = [maps.row_of_choice[:, choice] for choice in range(maps.row_of_choice.shape[-1])]
    return _move(rows, [maps.token_of_row], back, read)


def collect(rows: Tensor, maps: RowMaps, read: Read) -> Tensor:
    """Copies rows to the choices that fill them, zeros to others: [row, width] -> [token * choice, width].

    Arguments as for `fill`.
    """
    return _move(rows, [ops.reshape(maps.row_of_choice, (-1,))], [maps.choice_of_row], read)


def gather(rows: Tensor, index: Tensor, num_rows: int | Tensor) -> Tensor:
    """Gathers rows. The gradient is a segment sum into `num_rows` rows."""
    return _with_gradient(lambda rows: read_or_zero(rows, index),
                          lambda upstream: _sum_by_index(upstream, index, num_rows), rows)


def sum_rows(rows: Tensor, index: Tensor, num_rows: int | Tensor) -> Tensor:
    """Sums rows with the same index below `num_rows`: [row, width] -> [num_rows, width]. The gradient is a gather."""
    return _with_gradient(lambda rows: _sum_by_index(rows, index, num_rows),
                          lambda upstream: read_or_zero(upstream, index), rows)


def read_or_zero(rows: Tensor, index: Tensor) -> Tensor:
    """Gathers rows. The index one past the last row reads zeros."""
    return ops.take(ops.concatenate([rows, ops.zeros((1, rows.shape[-1]), rows.dtype)], axis=0), index, axis=0)


def _sum_by_index(rows, index, num_rows):
    # In float32: a token may be in a slot of every expert.
    summed = ops.segment_sum(dtypes.widen(rows), index, num_segments=num_rows + 1)[:num_rows]
    return ops.cast(summed, rows.dtype)


def _move(rows, there, back, read):
    """Sums rows read at each index in `there`. The gradient sums upstream rows read at each index in `back`."""
    return _with_gradient(lambda rows: sum(read(rows, index) for index in there),
                          lambda upstream: sum(read(upstream, index) for index in back), rows)


def _with_gradient(forward, backward, rows):
    @ops.custom_gradient
    def move(rows):
        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            return backward(upstream)

        return forward(rows), gradient

    return move(rows)
