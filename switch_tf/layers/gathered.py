"""Expert feed-forward by looking up the kernels of each row."""

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.feed_forward import activate
from switch_tf.ops import products


def gathered_feed_forward(rows, expert_index, input_kernels, output_kernel, activation):
    """Applies to each row the feed-forward layer of its expert.

    Args:
        rows: <compute dtype>[row, d_model].
        expert_index: <int32>[row]. The expert of each row.
        input_kernels: List of weights from `partitioning.add_weight`, [expert, d_model, d_ff], see `activate`.
        output_kernel: Weight from `partitioning.add_weight`, [expert, d_ff, output_dim].
        activation: str, see `activate`.

    Returns:
        <compute dtype>[row, output_dim]
    """
    hidden = activate([_times(rows, wi, expert_index) for wi in input_kernels], activation)
    return _times(hidden, output_kernel, expert_index)


def _times(rows, kernels, expert_index):
    return products.in_blocks(rows, partitioning.use(kernels, kernels.dtype),
                                  lambda part: ops.take(part, expert_index, axis=0))
