"""Operations by index, each with two implementations.

One device indexes: a product with a one-hot mask costs as much as the whole vocabulary or all experts. A program cut
over devices (and, for targets, a TPU) multiplies: partitioners gather the operands of an index, not of a product.
"""

from collections.abc import Sequence

import keras
from keras import ops

from switch_tf import checks
from switch_tf.ops.dtypes import widen
from switch_tf.ops.forms import is_fused, prefers_products
from switch_tf.ops.products import name_gradient_of, product
from switch_tf.partitioning.axes import arange, axes_of, constrain, gather, is_partitioned, is_split, scatter
from switch_tf.partitioning.tensors import Tensor

LEFT_OUT = -1e9  # as a logit; a row of infinities would have NaN gradients


def check_ids(name: str, values: Tensor, shape: Sequence[int | None]) -> Tensor:
    """Checks token ids, <int>[shape], and returns them.

    Under a strategy Keras builds a model with the mean of the replicas' batches. These float32 ids become int32.
    """
    with keras.SymbolicScope() as scope:
        is_symbolic = scope.original_scope is not None
    if is_symbolic and hasattr(values, "dtype") and keras.backend.is_float_dtype(values.dtype):
        values = ops.cast(values, "int32")
    checks.tensor(name, values, "int", shape)
    return values


def count_into_bins(index: Tensor, num_bins: int) -> Tensor:
    """Counts each bin in each group: <int32>[group, place], each in [0, num_bins) -> <int32>[group, bin]."""
    if is_partitioned():
        return ops.sum(ops.one_hot(index, num_bins, dtype="int32"), axis=1)
    # The cost does not grow with the number of bins.
    num_groups = ops.shape(index)[0]
    flat = ops.reshape(index + arange(num_groups)[:, None] * num_bins, (-1,))
    counts = ops.segment_sum(ops.ones_like(flat), flat, num_segments=num_groups * num_bins)
    return ops.reshape(counts, (num_groups, num_bins))


def look_up(variable: keras.Variable, token_ids: Tensor, dtype: str) -> Tensor:
    """Returns rows of a [vocab, embed] weight: <int32>[batch, length] -> <dtype>[batch, length, embed].

    The gradient is dense: sparse slices would make each update of a slot a scatter.
    """
    vocab_size = variable.shape[0]

    def is_token(dtype):
        is_equal = ops.equal(ops.expand_dims(ops.cast(token_ids, "int32"), -1), arange(vocab_size))
        return constrain(ops.cast(is_equal, dtype), ("batch", "length", "vocab"))

    if is_split("vocab"):
        return product("blv,vm->blm", is_token(dtype), variable)

    @ops.custom_gradient
    def gathered_rows(table):
        def gradient(upstream):
            upstream = widen(upstream)
            with name_gradient_of(variable), keras.name_scope("look_up"):
                if is_partitioned():
                    dense = ops.einsum("blv,blm->vm", is_token(upstream.dtype), upstream)
                    dense = scatter(dense, axes_of(variable))
                else:
                    dense = ops.segment_sum(ops.reshape(upstream, (-1, upstream.shape[-1])),
                                            ops.reshape(token_ids, (-1,)), num_segments=vocab_size)
                return ops.cast(dense, table.dtype)

        return ops.take(gather(ops.cast(table, dtype), axes_of(variable)), token_ids, axis=0), gradient

    return gathered_rows(ops.cast(variable, variable.dtype))


def write(x: Tensor, entry: Tensor, position: Tensor, axis: int) -> Tensor:
    """Returns `x` with `entry`, of length 1 along `axis`, written at `position`, an <int32> scalar."""
    if is_fused():
        # In place. A comparison would copy all of `x`.
        start = [0] * len(x.shape)
        start[axis] = position
        return ops.slice_update(x, ops.stack(start), entry)
    is_here = ops.reshape(ops.equal(arange(x.shape[axis]), position), (-1, *(1,) * (len(x.shape) - 1 - axis)))
    return ops.where(is_here, entry, x)


def normalizers_and_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's logsumexp, logit of the target, and index of the largest logit. Ties go to the first.

    <float32>[batch, length, vocab], <int32>[batch, length] -> <float32>, <float32> and <int32>[batch, length].
    """
    vocab_size = logits.shape[-1]
    if prefers_products():
        is_target = ops.equal(ops.expand_dims(targets, -1), ops.arange(vocab_size, dtype="int32"))
        target_logit = ops.sum(logits * ops.cast(is_target, logits.dtype), axis=-1)
        return ops.logsumexp(logits, axis=-1), target_logit, place_of_largest(logits)

    # Few passes over the logits, the largest tensor of a step.
    @ops.custom_gradient
    def reduced_rows(logits):
        largest, place = ops.top_k(logits, 1)
        exponentials = ops.exp(logits - largest)
        sums = ops.sum(exponentials, axis=-1, keepdims=True)
        # Floats hold places exactly up to 2^24 words.
        results = (largest + ops.log(sums), ops.take_along_axis(logits, index, axis=-1), ops.cast(place, logits.dtype))

        def gradient(upstream):
            scale = upstream[:, :1] / sums
            at_target = ops.take_along_axis(exponentials, index, axis=-1) * scale + upstream[:, 1:2]
            row_and_index = ops.concatenate([ops.arange(ops.shape(index)[0], dtype="int32")[:, None], index], axis=-1)
            return ops.scatter_update(exponentials * scale, row_and_index, at_target[:, 0])

        return ops.concatenate(results, axis=-1), gradient

    index = ops.reshape(targets, (-1, 1))
    results = reduced_rows(ops.reshape(logits, (-1, vocab_size)))
    normalizer, target_logit, place = ops.unstack(ops.reshape(results, (*ops.shape(targets), 3)), 3, axis=-1)
    return normalizer, target_logit, ops.cast(place, "int32")


def split_off(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Separates the logits of some tokens from the rest, with -1e9 in their places.

    <float32>[batch, length, vocab], <int32>[batch, length, k] -> <float32>[batch, length, k], [batch, length, vocab].
    """
    if prefers_products():
        # XLA fuses the comparisons into sums, so [batch, length, k, vocab] is never stored.
        is_token = ops.equal(ops.expand_dims(token_ids, -1), ops.arange(logits.shape[-1], dtype="int32"))
        chosen = ops.sum(ops.where(is_token, ops.expand_dims(logits, 2), 0.0), axis=-1)
        return chosen, ops.where(ops.any(is_token, axis=2), LEFT_OUT, logits)
    rows, index = ops.reshape(logits, (-1, logits.shape[-1])), ops.reshape(token_ids, (-1, token_ids.shape[-1]))
    place = ops.broadcast_to(arange(ops.shape(index)[0])[:, None], ops.shape(index))
    places = ops.reshape(ops.stack([place, index], axis=-1), (-1, 2))
    left_out = ops.full(ops.shape(places)[:1], LEFT_OUT, dtype=logits.dtype)
    rest = ops.reshape(ops.scatter_update(rows, places, left_out), ops.shape(logits))
    return ops.reshape(ops.take_along_axis(rows, index, axis=-1), ops.shape(token_ids)), rest


def place_of_largest(logits: Tensor) -> Tensor:
    """Returns the index of each row's first largest number: <float32>[..., vocab] -> <int32>[...]."""
    if not prefers_products():
        # Keras' argmax takes 60 times as long here: it distinguishes -0 from 0.
        return ops.top_k(logits, 1)[1][..., 0]
    # An argmax would gather a split vocabulary. Floats are exact up to 2^24 words; integers add a pass over the logits
    # on TPUs.
    vocab_size = logits.shape[-1]
    is_largest = ops.equal(logits, ops.max(logits, axis=-1, keepdims=True))
    places = ops.arange(vocab_size, dtype=logits.dtype)
    return ops.cast(ops.min(ops.where(is_largest, places, float(vocab_size)), axis=-1), "int32")
