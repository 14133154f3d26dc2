"""T5's noise (arXiv 1910.10683, section 3.1.4): documents cut into segments, and the tokens of a segment to predict.

The functions draw the same random numbers in the same order as t5 and have the same steps of `tf.data`. A seed gives
the same examples, and a run that was started with t5's functions can be resumed.
"""

from collections.abc import Callable, Mapping

import seqio
import tensorflow as tf

from switch_tf.refusals import Refusal

# A longer document contributes one random piece of this many tokens.
MAX_DOCUMENT_LENGTH = 65536
# Documents that are concatenated before they are cut, so that few segments are short.
DOCUMENTS_PER_BLOCK = 128


def segments(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Cuts documents into segments of `length` tokens, across the borders of documents.

    Args:
        dataset: Dataset of `{"targets": <int32>[tokens]}`, one element per document. Tokens 0 are dropped.
        length: int. Tokens of a segment. Only the last one of 128 documents is shorter.

    Returns: Dataset of `{"targets": <int32>[<= length]}`.
    """

    @seqio.map_over_dataset(num_seeds=1)
    def random_piece(example, seed):
        tokens = example["targets"]
        size = tf.size(tokens)
        count = (size + MAX_DOCUMENT_LENGTH - 1) // MAX_DOCUMENT_LENGTH
        _, drawn_with = tf.unstack(tf.random.experimental.stateless_split(seed))
        start = MAX_DOCUMENT_LENGTH * tf.random.stateless_uniform([], drawn_with, maxval=count, dtype=tf.int32)
        return {"targets": tokens[start : start + MAX_DOCUMENT_LENGTH]}

    @seqio.map_over_dataset(num_seeds=1)
    def cut(example, seed):
        del seed  # unused, but the seeds of later steps depend on the number of seeds drawn before
        tokens = example["targets"]
        count = (tf.size(tokens) + length - 1) // length
        padding = count * length - tf.size(tokens)
        rows = tf.reshape(tf.pad(tokens, [[0, padding]]), [count, length])
        lengths = tf.concat([tf.fill([count - 1], length), [length - padding]], axis=0)
        return tf.data.Dataset.zip(tuple(tf.data.Dataset.from_tensor_slices({"targets": x}) for x in (rows, lengths)))

    dataset = random_piece(dataset.filter(_has_tokens))
    dataset = dataset.map(lambda x: {"targets": x["targets"]}, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.padded_batch(DOCUMENTS_PER_BLOCK, {"targets": [-1]})
    dataset = dataset.map(_without_padding, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = cut(dataset.filter(_has_tokens)).flat_map(lambda part: part)
    return dataset.map(lambda row, size: {"targets": row["targets"][: size["targets"]]},
                       num_parallel_calls=tf.data.AUTOTUNE)


def _has_tokens(example):
    return tf.size(example["targets"]) > 0


def _without_padding(example):
    tokens = tf.reshape(example["targets"], [-1])
    return {"targets": tf.boolean_mask(tokens, tokens != 0)}


def add_noise(
    dataset: tf.data.Dataset,
    output_features: Mapping[str, seqio.Feature],
    mask: Callable,
    inputs: Callable,
    targets: Callable = lambda tokens, is_noise, last_id: tokens,
) -> tf.data.Dataset:
    """Makes inputs and targets from the tokens of each segment.

    Args:
        dataset: Dataset of `{"targets": <int32>[tokens]}`.
        output_features: seqio's description of inputs and targets, with the same vocabulary.
        mask: Function of a length and two seeds to `<bool>[length]`, True for noise.
        inputs, targets: Functions of tokens, that mask and the last id of the vocabulary to tokens.

    Raises:
        Refusal: Inputs and targets have different vocabularies.
    """
    vocabulary = output_features["targets"].vocabulary
    if output_features["inputs"].vocabulary != vocabulary:
        raise Refusal("Noise needs inputs and targets of one vocabulary, received "
                      f"{output_features['inputs'].vocabulary} and {vocabulary}.")

    @seqio.map_over_dataset(num_seeds=1)
    def noisy(example, seed):
        tokens, last_id = example["targets"], vocabulary.vocab_size - 1
        seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 6))
        is_noise = mask(tf.size(tokens), seeds[:2])
        return {"inputs": inputs(tokens, is_noise, last_id), "targets": targets(tokens, is_noise, last_id)}

    return noisy(dataset)


def token_mask(length: tf.Tensor, seeds: tf.Tensor, noise_density: float) -> tf.Tensor:
    """Marks each token with probability `noise_density`, independently."""
    return tf.random.stateless_uniform([length], seed=seeds[0]) < noise_density


def span_mask(length: tf.Tensor, seeds: tf.Tensor, noise_density: float, mean_span_length: float) -> tf.Tensor:
    """Marks spans of tokens with random lengths and positions. The first token is never marked.

    Args:
        length: <int32>[]. Tokens of the segment.
        seeds: Two of <int32>[2].
        noise_density: Share of marked tokens, in (0, 1).
        mean_span_length: Tokens per span.
    """
    size = tf.maximum(length, 2)
    num_noise = tf.cast(tf.round(tf.cast(size, tf.float32) * noise_density), tf.int32)
    num_noise = tf.clip_by_value(num_noise, 1, size - 1)
    num_spans = tf.maximum(1, tf.cast(tf.round(tf.cast(num_noise, tf.float32) / mean_span_length), tf.int32))
    kept = _random_lengths(size - num_noise, num_spans, seeds[1])
    dropped = _random_lengths(num_noise, num_spans, seeds[0])
    lengths = tf.reshape(tf.stack([kept, dropped], axis=1), [-1])
    return tf.repeat(tf.tile([False, True], [num_spans]), lengths)[:length]


def _random_lengths(total, count, seed):
    """Draws `count` positive integers with the sum `total`, with the same probability for all such lists."""
    is_border = seqio.stateless_shuffle(tf.cast(tf.range(total - 1) < count - 1, tf.int32), seed)
    borders = tf.cast(tf.where(is_border > 0)[:, 0], tf.int32) + 1
    borders = tf.concat([[0], borders, [total]], axis=0)
    return borders[1:] - borders[:-1]


def one_sentinel_per_span(tokens: tf.Tensor, is_noise: tf.Tensor, last_id: int) -> tf.Tensor:
    """Replaces each span of noise by one sentinel: the last id for the first span, the one below for the next."""
    is_inside = is_noise & tf.pad(is_noise[:-1], [[1, 0]])
    is_first = is_noise & ~is_inside
    sentinels = last_id + 1 - tf.cumsum(tf.cast(is_first, tokens.dtype))
    return tf.boolean_mask(tf.where(is_first, sentinels, tokens), ~is_inside)


def one_sentinel_per_kept_span(tokens: tf.Tensor, is_noise: tf.Tensor, last_id: int) -> tf.Tensor:
    """Replaces each span between the noise by one sentinel: the targets of `one_sentinel_per_span`."""
    return one_sentinel_per_span(tokens, ~is_noise, last_id)


def last_id_per_token(tokens: tf.Tensor, is_noise: tf.Tensor, last_id: int) -> tf.Tensor:
    """Replaces each token of noise by the last id."""
    return tf.where(is_noise, tf.cast(last_id, tokens.dtype), tokens)


def segment_length(inputs_length: int, noise_density: float, mean_span_length: float) -> int:
    """Returns the length of the longest segment that fits, with a sentinel for each span and the end of sequence."""
    def needed(length):
        num_noise = round(length * noise_density)
        return length - num_noise + round(num_noise / mean_span_length) + 1

    length = inputs_length - 1
    while needed(length + 1) <= inputs_length:
        length += 1
    return length
