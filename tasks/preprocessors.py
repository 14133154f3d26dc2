"""Pretraining objectives, from `{"text": string}` to `{"inputs": tokens, "targets": tokens}`."""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.refusals import Refusal
from switch_tf.tasks import noise, sentinels, vocabularies

NOISE_DENSITY = 0.15
MEAN_NOISE_SPAN_LENGTH = 3.0


def pretraining(objective: Callable) -> list[Callable]:
    """Returns the preprocessors of a pretraining task: text to tokens without sentinels, `objective`, end of sequence.

    No step branches on a tensor, so AutoGraph, which would take seconds in every process, is turned off.

    Args:
        objective: `span_corruption` or `masked_tokens`.
    """
    plain = tf.autograph.experimental.do_not_convert
    return [
        functools.partial(plain(seqio.preprocessors.rekey), key_map={"targets": "text"}),
        functools.partial(plain(seqio.preprocessors.tokenize), copy_pretokenized=False),
        plain(sentinels.spell_out),
        seqio.CacheDatasetPlaceholder(),
        plain(objective),
        plain(seqio.preprocessors.append_eos_after_trim),
    ]


def output_features(vocabulary: seqio.Vocabulary) -> dict[str, seqio.Feature]:
    """Returns seqio's description of inputs and targets, each with an end of sequence."""
    feature = seqio.Feature(vocabulary, add_eos=True)
    return {"inputs": feature, "targets": feature}


@data.typed_sentinels("gaps")
def span_corruption(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
    mean_noise_span_length: float = MEAN_NOISE_SPAN_LENGTH,
) -> tf.data.Dataset:
    """Applies T5's objective (arXiv 1910.10683, section 3.1.4): drops spans of 15 % of the tokens as targets.

    In the inputs each span is replaced by one sentinel, in the targets each sentinel is followed by its span.

    Args:
        dataset: Dataset of `{"targets": <int32>[tokens]}`, one element per document.
        sequence_length: Tokens of inputs and targets, the end of sequence included.
        output_features: Result of the function of that name.
        mean_noise_span_length: Mean number of tokens of a span.

    Raises:
        Refusal: The lengths are too short, or there are more spans than sentinels, which would use ids of real tokens.
    """
    check_span_corruption(sequence_length, mean_noise_span_length)
    length = noise.segment_length(sequence_length["inputs"], NOISE_DENSITY, mean_noise_span_length)
    mask = functools.partial(noise.span_mask, noise_density=NOISE_DENSITY, mean_span_length=mean_noise_span_length)
    return noise.add_noise(noise.segments(dataset, length), output_features, mask, noise.one_sentinel_per_span,
                           noise.one_sentinel_per_kept_span)


def check_span_corruption(
    sequence_length: Mapping[str, int],
    mean_noise_span_length: float = MEAN_NOISE_SPAN_LENGTH,
    num_sentinels: int = vocabularies.NUM_SENTINELS,
) -> None:
    """Refuses lengths that are too short for span corruption or need too many sentinels."""
    inputs_length, targets_length = sequence_length["inputs"], sequence_length["targets"]
    num_spans, needed = _num_spans_and_targets_length(inputs_length, mean_noise_span_length)
    if num_spans < 1:
        raise Refusal(
            f"Inputs of {inputs_length} tokens are too short for a span of {mean_noise_span_length:g} tokens at "
            f"{NOISE_DENSITY:.0%} noise; use inputs of at least {_shortest_inputs(mean_noise_span_length)} tokens."
        )
    if num_spans > num_sentinels:
        raise Refusal(
            f"Inputs of {inputs_length} tokens have {num_spans} spans of {mean_noise_span_length:g} tokens on average, "
            f"but the vocabulary has {num_sentinels} sentinels; use shorter inputs or a larger "
            "mean_noise_span_length (ByT5 uses 20 bytes)."
        )
    if targets_length < needed:
        raise Refusal(
            f"Span corruption of inputs of {inputs_length} tokens makes targets of {needed} tokens, received a length "
            f"of {targets_length}; set TASK_FEATURE_LENGTHS to "
            f'{{"inputs": {inputs_length}, "targets": {needed}}}.'
        )


@data.typed_sentinels("gaps")
def masked_tokens(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
    """Applies masked language modelling for an encoder without a decoder.

    15 % of the tokens, chosen independently, are replaced by the last id of the vocabulary. The targets are the whole
    original sequence. seqio.EncoderFeatureConverter counts the loss only at the positions of that id.

    Args:
        dataset: Dataset of `{"targets": <int32>[tokens]}`, one element per document.
        sequence_length: Tokens of inputs and targets, both the same, the end of sequence included.
        output_features: Result of the function of that name.
    """
    # Leaves room for the end of sequence.
    dataset = noise.segments(dataset, sequence_length["inputs"] - output_features["inputs"].add_eos)
    mask = functools.partial(noise.token_mask, noise_density=NOISE_DENSITY)
    return noise.add_noise(dataset, output_features, mask, noise.last_id_per_token)


def _num_spans_and_targets_length(inputs_length, mean_noise_span_length):
    tokens_length = noise.segment_length(inputs_length, NOISE_DENSITY, mean_noise_span_length)
    # T5 computes its mask in float32, which has one more token of noise than its helper for one length in a hundred.
    num_noise_tokens = int(np.round(np.float32(tokens_length) * np.float32(NOISE_DENSITY)))
    num_spans = int(np.round(np.float32(num_noise_tokens) / np.float32(mean_noise_span_length)))
    return num_spans, num_noise_tokens + num_spans + 1


def _shortest_inputs(mean_noise_span_length):
    inputs_length = 2
    while _num_spans_and_targets_length(inputs_length, mean_noise_span_length)[0] < 1:
        inputs_length += 1
    return inputs_length
