"""Experts without buffers: each row is multiplied by kernels that are looked up for it alone."""

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.feed_forward import activate
from switch_tf.ops import products


def gathered_feed_forward(rows, expert_index, input_kernels, output_kernel, activation):
    """The experts' feed-forward layers for a few rows, each by the expert that it names.

    Args:
        rows: <compute dtype>[row, d_model].
        expert_index: <int32>[row].
        input_kernels: list of weights from `partitioning.add_weight`, [expert, d_model, d_ff], see `activate`.
        output_kernel: such a weight, [expert, d_ff, output_dim].
        activation: str, see `activate`.

    Returns:
        <compute dtype>[row, output_dim]
    """
    hidden = activate([_times(rows, wi, expert_index) for wi in input_kernels], activation)
    return _times(hidden, output_kernel, expert_index)


def _times(rows, kernels, expert_index):
    return products.in_blocks(rows, partitioning.use(kernels, kernels.dtype),
                                  lambda part: ops.take(part, expert_index, axis=0))
