"""Padding masks and attention masks."""

from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs.semantics import Rules
from switch_tf.partitioning.tensors import Mask, Tensor


def padding_mask(inputs: Tensor, padding_mask: Mask, *keras_masks: Mask,
                 name: str = "padding_mask") -> Mask:
    """Returns the first mask that is not None, after checking it.

    Args:
        padding_mask: <bool>[batch, length], True at real tokens.
        *keras_masks: Keras passes `mask` to layers called with one tensor, and `inputs_mask` to layers called with
            several.
    """
    mask = next((mask for mask in (padding_mask, *keras_masks) if mask is not None), None)
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else ops.convert_to_tensor(mask)
    checks.tensor(name, mask, "bool", inputs.shape[:2])
    return mask


def attention_mask(query_segments: Tensor, key_segments: Tensor, is_causal: bool = False) -> Tensor:
    """Returns the attention mask of packed sequences.

    Args:
        query_segments: <int32>[batch, query]. Number of the packed example, 0 for padding.
        key_segments: <int32>[batch, key].

    Returns:
        <bool>[batch, 1, query, key]. Padding attends to padding, so no row is empty (Mesh TensorFlow).
    """
    mask = ops.equal(ops.expand_dims(query_segments, -1), ops.expand_dims(key_segments, 1))
    if is_causal:
        query, key = (partitioning.arange(ops.shape(segments)[1]) for segments in (query_segments, key_segments))
        mask = mask & (query[:, None] >= key[None])
    return ops.expand_dims(mask, 1)


def key_mask(key_is_real: Tensor) -> Tensor:
    """Returns a mask of real keys for all queries: <bool>[batch, key] -> <bool>[batch, 1, 1, key]."""
    return key_is_real[:, None, None, :]


def mask_keys(attention_mask: Mask, key_is_real: Mask) -> Mask:
    """Combines an attention mask with a key mask, <bool>[batch, key]. None means unrestricted."""
    if key_is_real is None:
        return attention_mask
    mask = key_mask(key_is_real)
    return mask if attention_mask is None else attention_mask & mask


def encoder_is_real(features: dict[str, Tensor]) -> Tensor:
    """Returns <bool>[batch, length] from the encoder's segments, else its nonzero tokens."""
    if "encoder_segment_ids" in features:
        return features["encoder_segment_ids"] > 0
    return ops.not_equal(features["encoder_input_tokens"], 0)


def decoder_is_real(features: dict[str, Tensor], rules: Rules) -> Tensor:
    """Returns <bool>[batch, length] from the decoder's segments, else its targets, else all True.

    The inputs cannot mark padding: their first token is also 0. With `Rules.masks_decoder_inputs` a 0 at position 0 or
    before a token is real (Flaxformer).
    """
    tokens = features["decoder_input_tokens"]
    if rules.masks_decoder_inputs:
        is_token = ops.not_equal(tokens, 0)
        precedes_token = ops.concatenate([is_token[:, 1:], ops.zeros_like(is_token[:, :1])], axis=1)
        is_first = ops.equal(partitioning.arange(ops.shape(tokens)[1]), 0)
        return is_token | precedes_token | is_first
    if "decoder_segment_ids" in features:
        return features["decoder_segment_ids"] > 0
    if "decoder_target_tokens" in features:
        return ops.not_equal(features["decoder_target_tokens"], 0)
    return ops.ones_like(tokens, dtype="bool")
