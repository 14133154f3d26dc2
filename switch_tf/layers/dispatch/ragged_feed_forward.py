"""Expert feed-forward on rows sorted by expert, without empty slots."""

from typing import Any, NamedTuple

from keras import ops

from switch_tf import partitioning
from switch_tf.layers import dropout
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.layers.feed_forward import activate
from switch_tf.partitioning.tensors import Tensor


class RaggedRows(NamedTuple):
    """Owners of the rows of an unpadded buffer, sorted by expert.

    `rows_of_expert`: <int32>[expert]. Number of rows of each expert. The rows after them, at least one, are empty.
    `group`: <int32>[row]. Group of the global batch that the row comes from.
    `place`: <int32>[row]. slot * num_experts + expert. Dropout draws by group and place, see
        `ExpertFeedForward.dropout_mask`.
    """

    rows_of_expert: Any
    group: Any
    place: Any


def ragged_feed_forward(experts: ExpertFeedForward, rows: Tensor, owners: RaggedRows,
                        training: bool = False) -> Tensor:
    """Applies each expert's feed-forward layer to its rows.

    At inference, experts without rows are skipped if there are fewer rows than experts or the number of rows is
    unknown.

    Args:
        experts: ExpertFeedForward.
        rows: <compute dtype>[row, d_model].
        owners: RaggedRows.
        training: bool.

    Returns:
        <compute dtype>[row, output_dim]. Zeros in empty rows.
    """
    num_rows, num_experts = rows.shape[0], experts.num_experts
    lengths = owners.rows_of_expert
    if not training and num_rows is None:
        return _in_a_loop(experts, rows, lengths)
    if not training and isinstance(num_rows, int) and num_rows < num_experts:
        # One of the rows is empty. top_k is stable: it returns experts with rows first, in the order of their rows.
        busy = ops.top_k(ops.cast(lengths > 0, "int32"), num_rows - 1)[1]
        lengths = ops.take(lengths, busy)
        input_kernels = [_slices(wi, busy, rows.dtype) for wi in experts.input_kernels]
        output_kernels = _slices(experts.wo, busy, rows.dtype)
    else:
        input_kernels = [ops.unstack(partitioning.use(wi, rows.dtype), num_experts) for wi in experts.input_kernels]
        output_kernels = ops.unstack(partitioning.use(experts.wo, rows.dtype), num_experts)
    hidden = [activate([ops.matmul(part, wi) for wi in kernels], experts.activation)
              for part, *kernels in zip(_split(rows, lengths), *input_kernels, strict=True)]
    if training and experts.dropout_rate:
        masks = _split(experts.dropout_mask(owners.group[:, None], owners.place[:, None], rows.dtype), lengths)
        hidden = [dropout.masked(part, mask) for part, mask in zip(hidden, masks, strict=True)]
    outputs = [ops.matmul(part, wo) for part, wo in zip(hidden, output_kernels, strict=True)]
    return _append_empty(outputs, ops.shape(rows)[0] - ops.sum(owners.rows_of_expert))


def _in_a_loop(experts, rows, lengths):
    """Applies experts in a loop, one turn per expert with rows, for an unknown number of rows."""
    busy = ops.nonzero(lengths > 0)[0]
    starts = ops.cumsum(lengths) - lengths
    num_filled = ops.sum(lengths)

    def turn(index, outputs):
        expert = busy[index][None]
        start, length = ops.take(starts, expert)[0], ops.take(lengths, expert)[0]
        part = ops.slice(rows, (start, 0), (length, rows.shape[-1]))
        hidden = activate([ops.matmul(part, *_slices(wi, expert, rows.dtype)) for wi in experts.input_kernels],
                          experts.activation)
        part = ops.matmul(hidden, *_slices(experts.wo, expert, rows.dtype))
        return index + 1, ops.concatenate([outputs, part], axis=0)

    first = ops.convert_to_tensor(0, "int32"), ops.zeros((0 * num_filled, experts.wo.shape[-1]), rows.dtype)
    _, outputs = ops.while_loop(lambda index, _: index < ops.size(busy), turn, first)
    return _append_empty([outputs], ops.shape(rows)[0] - num_filled)


def _append_empty(outputs, num_empty):
    last = outputs[-1]
    return ops.concatenate([*outputs, ops.zeros((num_empty, last.shape[-1]), last.dtype)], axis=0)


def _slices(kernel, indices, dtype):
    """Returns kernels by index, a list of [d_model, d_ff]. TensorFlow slices whole entries without a copy."""
    value = ops.convert_to_tensor(kernel)
    return [ops.cast(ops.squeeze(ops.slice(value, (index, 0, 0), (1, *kernel.shape[1:])), 0), dtype)
            for index in ops.unstack(indices, indices.shape[0])]


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
