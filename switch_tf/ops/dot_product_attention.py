"""Queries, keys and values to mixed values: T5's softmax in float32 over a position bias and a mask.

Scores are the largest arrays of a step, [batch, heads, query, key]. Autodiff keeps several of them in float32, and
passes over them again for each product of the backward pass. Here one is kept, the probabilities, in the compute dtype,
and one pass makes the gradient of the scores, whose sum over the batch is the position bias' gradient. On a TPU queries
come in blocks besides, whose scores stay in the memory on the chip (docs/compile.md has what that gains).
"""

from keras import ops

from switch_tf import partitioning
from switch_tf.ops import dtypes, forms, products

MASKED = -1e9


def dot_product_attention(query, key, value, attention_mask, position_bias, scope_of):
    """What each query finds in the values of the keys it may look at, with a gradient of its own.

    Args:
        query, key: <any float>[batch, query or key, heads, d_kv].
        value: <compute dtype>[batch, key, heads, d_kv].
        attention_mask: <bool>[batch, 1, query or 1, key], True where a query may look, or None.
        position_bias: <float32>[1, heads, query, key] or None, added to the scores.
        scope_of: weight whose layer the operations of the gradient are named after.

    Returns:
        <compute dtype>[batch, query, heads, d_kv]
    """
    length, at_a_time = query.shape[1], forms.queries_at_a_time()
    if at_a_time is None or length is None or length <= at_a_time:
        return _of_block(query, key, value, attention_mask, position_bias, scope_of)
    mixed = []
    for start in range(0, length, at_a_time):
        block = slice(start, start + at_a_time)
        mask = attention_mask if attention_mask is None or attention_mask.shape[2] == 1 else attention_mask[:, :, block]
        bias = None if position_bias is None else position_bias[:, :, block]
        mixed.append(_of_block(query[:, block], key, value, mask, bias, scope_of))
    return ops.concatenate(mixed, axis=1)


def probabilities(query, key, attention_mask, position_bias, dtype, keys="bkhd"):
    """How much each query looks at each key: <dtype>[batch, heads, query, key]; `keys`: the axes of `key`, in order."""
    scores = ops.einsum(f"bqhd,{keys}->bhqk", dtypes.widen(query), dtypes.widen(key))
    scores = _constrain(scores)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = ops.where(attention_mask, scores, MASKED)
    return ops.cast(ops.softmax(scores, axis=-1), dtype)


def _of_block(query, key, value, attention_mask, position_bias, scope_of):
    @ops.custom_gradient
    def attend(query, key, value, *bias):
        probs = probabilities(query, key, attention_mask, *(bias or (None,)), value.dtype)
        mixed = ops.einsum("bhqk,bkhd->bqhd", *map(dtypes.widen, (probs, value)))

        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            with products.in_gradient_of(scope_of):
                return backward(probs, mixed, upstream)

        def backward(probs, mixed, upstream):
            wide = dtypes.widen
            of_value = ops.einsum("bhqk,bqhd->bkhd", probs, upstream)
            of_probs = _constrain(ops.einsum("bqhd,bkhd->bhqk", wide(upstream), wide(value)))
            # The sum over keys of probabilities times their gradients, without another pass over them.
            mean = ops.sum(wide(upstream) * mixed, axis=-1)
            of_scores = wide(probs) * (of_probs - ops.transpose(mean, (0, 2, 1))[..., None])
            if attention_mask is not None:
                # A query that may look nowhere has probabilities, but no score that made them.
                of_scores = ops.where(attention_mask, of_scores, 0.0)
            of_bias = [ops.sum(of_scores, axis=0, keepdims=True)] if bias else []
            of_scores = wide(ops.cast(of_scores, value.dtype))
            of_query = ops.einsum("bhqk,bkhd->bqhd", of_scores, wide(key))
            of_key = ops.einsum("bhqk,bqhd->bkhd", of_scores, wide(query))
            return ops.cast(of_query, query.dtype), ops.cast(of_key, key.dtype), of_value, *of_bias

        return ops.cast(mixed, value.dtype), gradient

    return attend(query, key, value, *(() if position_bias is None else (position_bias,)))


def _constrain(scores):
    return partitioning.constrain(scores, ("batch", "heads", None, None))
