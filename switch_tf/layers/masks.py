"""Which positions are real, and which of them a query may attend to."""

from keras import ops

from switch_tf import checks, partitioning


def padding_mask(inputs, padding_mask, *keras_masks, name="padding_mask"):
    """The mask of a call: what the caller gives, else what Keras carries with the inputs, checked.

    Args:
        inputs: <any float>[batch, length, d_model].
        padding_mask: <bool>[batch, length] or None.
        keras_masks: what Keras gave for `mask`, where a layer is called with one tensor, and for `inputs_mask`, where
            it is called with several; same as `padding_mask`.
        name: str, of the argument.

    Returns:
        <bool>[batch, length], True where the token is real, or None.
    """
    given = next((mask for mask in (padding_mask, *keras_masks) if mask is not None), None)
    if given is None:
        return None
    given = given if hasattr(given, "dtype") else ops.convert_to_tensor(given)
    checks.tensor(name, given, "bool", inputs.shape[:2])
    return given


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


def without_keys(attention_mask, key_is_real):
    """What `attention_mask` allows but for masked keys: <bool>[batch, key]; either may be None, for no restriction."""
    if attention_mask is None or key_is_real is None:
        return attention_mask if key_is_real is None else key_mask(key_is_real)
    return ops.logical_and(attention_mask, key_mask(key_is_real))


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
