"""Expert feed-forward on rows sorted by expert, without empty slots."""

from typing import Any, NamedTuple

from keras import ops

from switch_tf import partitioning
from switch_tf.layers import dropout
from switch_tf.layers.feed_forward import activate


class RaggedRows(NamedTuple):
    """Owners of the rows of an unpadded buffer, sorted by expert.

    `rows_of_expert`: <int32>[expert]. Number of rows of each expert. The rows after them, at least one, are empty.
    `group`: <int32>[row]. Group of the global batch that the row comes from.
    `place`: <int32>[row]. slot * num_experts + expert, the row's position in a padded buffer. Dropout draws by group
        and place, so that it is the same for every dispatch.
    """

    rows_of_expert: Any
    group: Any
    place: Any


def ragged_feed_forward(rows, ragged: RaggedRows, input_kernels, output_kernel, activation, dropout_mask=None,
                        training=False):
    """Applies each expert's feed-forward layer to its rows.

    Args:
        rows: <compute dtype>[row, d_model].
        ragged: RaggedRows.
        input_kernels: List of weights from `partitioning.add_weight`, [expert, d_model, d_ff], see `activate`.
        output_kernel: Weight from `partitioning.add_weight`, [expert, d_ff, output_dim].
        activation: str, see `activate`.
        dropout_mask: Maps <int32>[row, 1] groups and places and a dtype to a `dropout.mask` [row, d_ff]. None for no
            dropout.
        training: bool. At inference, experts without rows are skipped if there are fewer rows than experts or the
            number of rows is unknown.

    Returns:
        <compute dtype>[row, output_dim]. Zeros in empty rows.
    """
    num_rows, num_experts = rows.shape[0], ragged.rows_of_expert.shape[0]
    lengths = ragged.rows_of_expert
    if not training and num_rows is None:
        return _in_a_loop(rows, lengths, input_kernels, output_kernel, activation)
    if not training and isinstance(num_rows, int) and num_rows < num_experts:
        # One of the rows is empty. top_k is stable: it returns experts with rows first, in the order of their rows.
        wanted = ops.top_k(ops.cast(lengths > 0, "int32"), num_rows - 1)[1]
        lengths = ops.take(lengths, wanted)
        input_kernels = [_some(wi, wanted, rows.dtype) for wi in input_kernels]
        output_kernels = _some(output_kernel, wanted, rows.dtype)
    else:
        input_kernels = [ops.unstack(partitioning.use(wi, rows.dtype), num_experts) for wi in input_kernels]
        output_kernels = ops.unstack(partitioning.use(output_kernel, rows.dtype), num_experts)
    parts = _split(rows, lengths)
    hidden = [activate([ops.matmul(part, wi) for wi in kernels], activation)
              for part, *kernels in zip(parts, *input_kernels, strict=True)]
    if dropout_mask is not None:
        mask = dropout_mask(ragged.group[:, None], ragged.place[:, None], rows.dtype)
        hidden = [dropout.masked(part, own) for part, own in zip(hidden, _split(mask, lengths), strict=True)]
    outputs = [ops.matmul(part, wo) for part, wo in zip(hidden, output_kernels, strict=True)]
    return _and_empty(outputs, ops.shape(rows)[0] - ops.sum(ragged.rows_of_expert))


def _in_a_loop(rows, lengths, input_kernels, output_kernel, activation):
    """Applies experts in a loop, one turn per expert with rows, for an unknown number of rows."""
    wanted = ops.nonzero(lengths > 0)[0]
    starts = ops.cumsum(lengths) - lengths
    num_filled = ops.sum(lengths)

    def turn(index, outputs):
        expert = wanted[index][None]
        start, length = ops.take(starts, expert)[0], ops.take(lengths, expert)[0]
        own = ops.slice(rows, (start, 0), (length, rows.shape[-1]))
        hidden = activate([ops.matmul(own, *_some(wi, expert, rows.dtype)) for wi in input_kernels], activation)
        own = ops.matmul(hidden, *_some(output_kernel, expert, rows.dtype))
        return index + 1, ops.concatenate([outputs, own], axis=0)

    first = ops.convert_to_tensor(0, "int32"), ops.zeros((0 * num_filled, output_kernel.shape[-1]), rows.dtype)
    _, outputs = ops.while_loop(lambda index, _: index < ops.size(wanted), turn, first)
    return _and_empty([outputs], ops.shape(rows)[0] - num_filled)


def _and_empty(outputs, num_empty):
    last = outputs[-1]
    return ops.concatenate([*outputs, ops.zeros((num_empty, last.shape[-1]), last.dtype)], axis=0)


def _some(kernel, wanted, dtype):
    """Returns kernels by index, a list of [d_model, d_ff]. TensorFlow slices whole entries without a copy."""
    value = ops.convert_to_tensor(kernel)
    return [ops.cast(ops.squeeze(ops.slice(value, (index, 0, 0), (1, *kernel.shape[1:])), 0), dtype)
            for index in ops.unstack(wanted, wanted.shape[0])]


def _split(rows, lengths):
    """Splits rows by length: [row, width], <int32>[piece] lengths -> list of [length, width]."""
    count = lengths.shape[0]

    @ops.custom_gradient
    def split(rows):
        ends = ops.cumsum(lengths)
        pieces = [ops.slice(rows, (ends[i] - lengths[i], 0), (lengths[i], rows.shape[-1])) for i in range(count)]

        def gradient(*upstream):
            # Without it, each slice's gradient would be a tensor of all rows.
            num_left = ops.shape(rows)[0] - ends[-1]
            return ops.concatenate([*upstream, ops.zeros((num_left, rows.shape[-1]), rows.dtype)], axis=0)

        return pieces, gradient

    return split(rows)
