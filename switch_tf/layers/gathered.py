"""Experts without buffers: each row is multiplied by kernels that are looked up for it alone."""

import math

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.feed_forward import activate

_AT_ONCE = 8


def each_its_own(rows, expert_index, input_kernels, output_kernel):
    """The experts' feed-forward layers for a few rows, each by the expert that it names.

    Args:
        rows: <compute dtype>[row, d_model].
        expert_index: <int32>[row].
        input_kernels: list of weights from `partitioning.add_weight`, [expert, d_model, d_ff], see `activate`.
        output_kernel: such a weight, [expert, d_ff, output_dim].

    Returns:
        <compute dtype>[row, output_dim]
    """
    hidden = activate([_times(rows, wi, expert_index) for wi in input_kernels])
    return _times(hidden, output_kernel, expert_index)


def _times(rows, kernels, expert_index):
    num_experts, width, num_columns = kernels.shape
    at_once = math.gcd(width, _AT_ONCE)
    kernels = partitioning.use(kernels, kernels.dtype)
    blocks = ops.reshape(kernels, (num_experts, width // at_once, at_once, num_columns))
    rows_in_blocks = ops.reshape(rows, (-1, width // at_once, at_once))
    # Sums of a few products, which XLA fuses with what looks the kernels up and computes many columns of at once, and
    # then the sum of those. A product of its own would copy the kernels; one sum of all goes down the columns.
    summed = sum(
        partitioning.widen(rows_in_blocks[:, :, place, None])
        * partitioning.widen(ops.cast(ops.take(blocks[:, :, place], expert_index, axis=0), rows.dtype))
        for place in range(at_once))
    return ops.cast(ops.sum(summed, axis=1), rows.dtype)
