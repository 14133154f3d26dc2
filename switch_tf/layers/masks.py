"""Which positions a query may attend to."""

from keras import ops

from switch_tf import partitioning


def attention_mask(query_segments, key_segments, is_causal=False):
    """True where a query may look at a key.

    Args:
        query_segments: <int32>[batch, query]. Which of the packed examples a position belongs to; 0 is padding.
        key_segments: <int32>[batch, key].
        is_causal: bool. Queries do not look at later keys.

    Returns:
        <bool>[batch, 1, query, key]. Padding queries see padding keys, as in Mesh TensorFlow, so no row is empty.
    """
    mask = ops.equal(ops.expand_dims(query_segments, -1), ops.expand_dims(key_segments, 1))
    if is_causal:
        query = ops.expand_dims(partitioning.arange(ops.shape(query_segments)[1]), -1)
        key = ops.expand_dims(partitioning.arange(ops.shape(key_segments)[1]), 0)
        mask = ops.logical_and(mask, query >= key)
    return ops.expand_dims(mask, 1)


def key_mask(key_is_real):
    """Every query may look at every real key: <bool>[batch, key] -> <bool>[batch, 1, 1, key]."""
    return ops.expand_dims(ops.expand_dims(key_is_real, 1), 1)


def encoder_is_real(features):
    """False at the encoder's padding: <bool>[batch, length], from the segments, or from the tokens (padding is 0)."""
    if "encoder_segment_ids" in features:
        return features["encoder_segment_ids"] > 0
    return ops.not_equal(features["encoder_input_tokens"], 0)


def decoder_is_real(features):
    """False at the decoder's padding: <bool>[batch, length], from the segments, else the targets, else all True.

    Never from the decoder's inputs: their first token, the start of the sequence, is 0 like padding.
    """
    if "decoder_segment_ids" in features:
        return features["decoder_segment_ids"] > 0
    if "decoder_target_tokens" in features:
        return ops.not_equal(features["decoder_target_tokens"], 0)
    return ops.ones_like(features["decoder_input_tokens"], dtype="bool")
