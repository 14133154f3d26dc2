"""Who may look at whom: packed examples apart, decoders never ahead, padding never at real tokens."""

import numpy as np
import pytest

from switch_tf.configs.semantics import rules_of
from switch_tf.layers import masks


def test_a_query_sees_the_keys_of_its_own_segment():
    mask = masks.attention_mask(np.array([[1, 2, 0]]), np.array([[1, 1, 2, 0]]))
    assert mask.shape == (1, 1, 3, 4)
    # Padding (0) sees padding, so that no row is empty.
    np.testing.assert_array_equal(mask[0, 0], [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])


def test_a_causal_query_sees_no_later_key():
    segments = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])
    mask = masks.attention_mask(segments, segments, is_causal=True)
    np.testing.assert_array_equal(mask[0, 0], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(mask[1, 0], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_query_is_left_without_a_key(is_causal):
    segments = np.random.RandomState(0).randint(0, 4, (5, 20))
    assert np.asarray(masks.attention_mask(segments, segments, is_causal)).any(-1).all()


def test_a_key_mask_is_the_same_for_every_query():
    mask = masks.key_mask(np.array([[True, False], [True, True]]))
    assert mask.shape == (2, 1, 1, 2)
    np.testing.assert_array_equal(mask[:, 0, 0], [[True, False], [True, True]])


def test_the_encoders_padding_comes_from_segments_else_from_tokens():
    tokens, segments = np.array([[5, 0, 3, 0]]), np.array([[1, 1, 2, 0]])
    # A token 0 inside of a segment is real.
    np.testing.assert_array_equal(
        masks.encoder_is_real({"encoder_input_tokens": tokens, "encoder_segment_ids": segments}), [[1, 1, 1, 0]])
    np.testing.assert_array_equal(masks.encoder_is_real({"encoder_input_tokens": tokens}), [[1, 0, 1, 0]])


def test_the_decoders_padding_comes_from_segments_else_targets():
    # The first input, 0, starts the sequence; it is not padding.
    features = {"decoder_input_tokens": np.array([[0, 5, 3, 1]])}
    np.testing.assert_array_equal(masks.decoder_is_real(features, rules_of("switch_tf")), [[1, 1, 1, 1]])
    features["decoder_target_tokens"] = np.array([[5, 3, 1, 0]])
    np.testing.assert_array_equal(masks.decoder_is_real(features, rules_of("switch_tf")), [[1, 1, 1, 0]])
    features["decoder_segment_ids"] = np.array([[1, 1, 0, 0]])
    np.testing.assert_array_equal(masks.decoder_is_real(features, rules_of("switch_tf")), [[1, 1, 0, 0]])


@pytest.mark.parametrize("inputs, expected", [
    # Sequences of 3 and 0 more tokens: the position after the end, whose input is the end, is real.
    ([[0, 5, 3, 1, 0], [0, 0, 0, 0, 0]], [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]),
    # Packed: the second sequence starts with a 0 before a token.
    ([[0, 5, 0, 4, 6], [0, 5, 7, 0, 0]], [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    ([[0], [7]], [[1], [1]])])
def test_the_decoders_padding_comes_from_its_inputs_in_flaxformer(inputs, expected):
    features = {"decoder_input_tokens": np.array(inputs), "decoder_target_tokens": np.zeros_like(inputs),
                "decoder_segment_ids": np.zeros_like(inputs)}
    np.testing.assert_array_equal(masks.decoder_is_real(features, rules_of("t5x")), expected)
