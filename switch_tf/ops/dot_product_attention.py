"""Dot-product attention with T5's position bias and a softmax in float32.

Scores, [batch, heads, query, key], are the largest arrays of a step. This gradient keeps only the probabilities, in the
compute dtype, and computes the scores' gradient in one pass. On a TPU, blocks of queries keep their scores on the chip,
and outputs are divided by the sums of the exponentials, as in FlashAttention (docs/notebook/tpu.md).
"""

from typing import TypeAlias

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.ops import dtypes, forms, products
from switch_tf.partitioning.axes import is_split
from switch_tf.partitioning.tensors import Tensor

# <float32>[1, heads, query, key], whole or in the blocks of `cut`.
PositionBias: TypeAlias = Tensor | tuple[Tensor, ...]

MASKED = -1e9
_QUERIES, _HEADS = 1, 2  # axes of queries; axes 2 and 1 of a position bias


def cut(position_bias: Tensor) -> PositionBias:
    """Cuts <float32>[1, heads, query, key] into the blocks of attention, if any.

    Cut a shared bias once: its gradients are then added before the sum over devices.
    """
    _, heads, length, _ = position_bias.shape
    blocks = _blocks(length, heads)
    return position_bias if blocks is None else tuple(_slices(position_bias, 3 - blocks[0], blocks[1]))


def _slices(x, axis, blocks):
    return (x[(slice(None),) * axis + (block,)] for block in blocks)


def dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                          position_bias: PositionBias | None, scope_of: keras.Variable) -> Tensor:
    """Returns the values mixed by attention, <compute dtype>[batch, query, heads, d_kv], with a custom gradient.

    Args:
        query, key: <any float>[batch, query or key, heads, d_kv].
        value: <compute dtype>[batch, key, heads, d_kv].
        attention_mask: <bool>[batch, 1, query or 1, key], True where a query may attend to a key.
        scope_of: The gradient's operations are named after this variable's layer.
    """
    blocks = _blocks(query.shape[1], query.shape[2])
    if blocks is None:
        return _attend(query, key, value, attention_mask, position_bias, scope_of)
    axis, slices = blocks

    def blocks_of(x, axis):
        return [x] * len(slices) if axis is None or x is None else _slices(x, axis, slices)

    is_by_query = axis == _QUERIES
    has_queries = is_by_query and attention_mask is not None and attention_mask.shape[2] != 1
    if not isinstance(position_bias, tuple):
        position_bias = blocks_of(position_bias, 3 - axis)
    key, value = (blocks_of(x, None if is_by_query else axis) for x in (key, value))
    mixed = [_attend(*parts, scope_of) for parts in zip(
        blocks_of(query, axis), key, value, blocks_of(attention_mask, 2 if has_queries else None), position_bias,
        strict=True)]
    return ops.concatenate(mixed, axis=axis)


def _blocks(length, heads):
    """Returns the axis of queries to cut into blocks, and the slices."""
    most = forms.queries_at_a_time()
    if most is None or length is None or length <= most:
        return None
    if is_split("heads"):
        return _QUERIES, [slice(start, start + most) for start in range(0, length, most)]
    # Blocks of heads may be smaller: they share no keys, so no gradients are added.
    size = max(1, heads * most // (2 * length))
    return _HEADS, [slice(start, start + size) for start in range(0, heads, size)]


def probabilities(query: Tensor, key: Tensor, attention_mask: Tensor | None, position_bias: Tensor | None, dtype: str,
                  keys: str = "bkhd") -> Tensor:
    """Returns the attention probabilities, <dtype>[batch, heads, query, key].

    `keys` has the einsum letters of the axes of `key`.
    """
    return ops.cast(ops.softmax(_scores(query, key, attention_mask, position_bias, keys), axis=-1), dtype)


def _scores(query, key, attention_mask, position_bias, keys="bkhd"):
    scores = ops.einsum(f"bqhd,{keys}->bhqk", dtypes.widen(query), dtypes.widen(key))
    scores = _constrain(scores)
    if position_bias is not None:
        scores = scores + position_bias
    return scores if attention_mask is None else ops.where(attention_mask, scores, MASKED)


def _attend(query, key, value, attention_mask, position_bias, scope_of):
    @ops.custom_gradient
    def attend(query, key, value, *bias):
        scores = _scores(query, key, attention_mask, *(bias or (None,)))
        if forms.divides_outputs():
            # The sums are over rounded exponentials: exact sums would need another pass on a TPU.
            probs = ops.cast(ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)), value.dtype)
            scale = ops.transpose(1 / ops.sum(dtypes.widen(probs), axis=-1), (0, 2, 1))[..., None]
        else:
            probs, scale = ops.cast(ops.softmax(scores, axis=-1), value.dtype), None
        mixed = _scaled(ops.einsum("bhqk,bkhd->bqhd", *map(dtypes.widen, (probs, value))), scale)

        @products.name_gradient_of(scope_of)
        def gradient(upstream):
            wide = dtypes.widen
            # The upstream gradient takes the scale of the exponentials.
            upstream = _scaled(upstream, scale)
            value_gradient = ops.einsum("bhqk,bqhd->bkhd", probs, upstream)
            probs_gradient = _constrain(ops.einsum("bqhd,bkhd->bhqk", wide(upstream), wide(value)))
            # The sum over keys of probabilities times gradients, without another pass.
            mean = ops.sum(wide(upstream) * mixed, axis=-1)
            scores_gradient = wide(probs) * (probs_gradient - ops.transpose(mean, (0, 2, 1))[..., None])
            if attention_mask is not None:
                # A query that sees no key has a gradient, as if masks were added to scores (Mesh TensorFlow, T5X).
                # Otherwise this changes no number, but TPU compilers fuse more: 20 % less memory and 4 % less time for
                # two layers of Switch-Base.
                sees_none = ~ops.any(attention_mask, axis=-1, keepdims=True)
                scores_gradient = ops.where(attention_mask | sees_none, scores_gradient, 0.0)
            bias_gradient = [ops.sum(scores_gradient, axis=0, keepdims=True)] if bias else []
            scores_gradient = wide(ops.cast(scores_gradient, value.dtype))
            query_gradient = ops.einsum("bhqk,bkhd->bqhd", scores_gradient, wide(key))
            key_gradient = ops.einsum("bhqk,bqhd->bkhd", scores_gradient, wide(query))
            return (ops.cast(query_gradient, query.dtype), ops.cast(key_gradient, key.dtype), value_gradient,
                    *bias_gradient)

        return ops.cast(mixed, value.dtype), gradient

    return attend(query, key, value, *(() if position_bias is None else (position_bias,)))


def _scaled(x, scale):
    return x if scale is None else ops.cast(dtypes.widen(x) * scale, x.dtype)


def _constrain(scores):
    return partitioning.constrain(scores, ("batch", "heads", None, None))
