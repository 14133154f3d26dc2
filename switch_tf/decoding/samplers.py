"""Samplers that choose one token at a time."""

import dataclasses

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.decoding.loop import Decoded, decode
from switch_tf.ops import indexing, random
from switch_tf.partitioning.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Decoding with the most probable token at each step."""

    num_beams = 1

    def decode(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
               end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Decoded:
        """Decodes one sequence per row, see `loop.decode`. `rows` is ignored, because nothing is sampled."""
        return _one_result(decode(model, features, max_length, end_id, _most_probable))

    def ids(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
            end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Tensor:
        """Decodes ids alone, <int32>[batch, max_length]. Faster than `decode` and works under any layout."""
        return decode(model, features, max_length, end_id, _most_probable, has_scores=False, any_layout=True)[0]


def _most_probable(logits, _):
    return indexing.place_of_largest(logits)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sampling from the model's distribution, optionally limited to the most probable tokens.

    A sample depends only on the seed, the row's number and the position, not on the batch around the row.

    Args:
        temperature: float, above 0. Divides the logits. Values below 1 favour likely tokens.
        top_k: int or None. Sample from this many most probable tokens, including ties with the last.
        top_p: float in (0, 1] or None. Sample from the smallest set of most probable tokens with this total
            probability, after `top_k` (arXiv 1904.09751).
        seed: int, 0 or above.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    num_beams = 1

    def __post_init__(self):
        checks.fields(self, ["temperature"], checks.number, "above 0")
        checks.fields(self, ["top_k"], checks.optional, checks.integer, 1)
        checks.fields(self, ["top_p"], checks.optional, checks.number, "in (0, 1]")
        checks.fields(self, ["seed"], checks.integer, 0)

    def decode(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
               end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Decoded:
        """Decodes one sequence per row, see `loop.decode`.

        Args:
            model, features, max_length, end_id: See `loop.decode`.
            rows: <int32>[batch]. Number of each row among all decoded rows. None for 0, 1, 2, ...
        """
        return _one_result(decode(model, features, max_length, end_id, self._choice(rows)))

    def ids(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
            end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Tensor:
        """Decodes ids alone, <int32>[batch, max_length]. Faster than `decode`. Arguments as for `decode`."""
        return decode(model, features, max_length, end_id, self._choice(rows), has_scores=False)[0]

    def _choice(self, rows):
        def choose(logits, position):
            numbers = random.batch_positions(ops.shape(logits)[0]) if rows is None else rows
            return self.draw(logits, numbers, position)

        return choose

    def draw(self, logits: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        """Samples a token per row: <float32>[batch, vocab_size], <int32>[batch], <int32> scalar -> <int32>[batch]."""
        logits = logits / self.temperature
        vocab_size = logits.shape[-1]
        if self.top_k is not None and self.top_k < vocab_size:
            logits = _mask_below(logits, ops.top_k(logits, self.top_k)[0][:, -1:])
        if self.top_p is not None and self.top_p < 1:
            logits = _mask_below(logits, _top_p_threshold(logits, self.top_p))
        # The token with the shortest of exponential waiting times. Short times need more than 24 random bits, so a
        # second draw supplies the bits below the first.
        seed = random.step_seed(self.seed, position)
        below = random.step_seed(self.seed, -1 - position)
        places = partitioning.arange(vocab_size)
        uniform, rest = (random.uniform_at(draw, rows[:, None], places) for draw in (seed, below))
        waits = -ops.log1p(-(uniform + rest * 2.0**-24) * (1 - 2.0**-24))
        return ops.cast(ops.argmax(logits - ops.cast(ops.log(waits), logits.dtype), axis=-1), "int32")


def _one_result(decoded):
    return Decoded(*(values[:, None] for values in decoded))


def _mask_below(logits, threshold):
    return ops.where(logits < threshold, -float("inf"), logits)


def _top_p_threshold(logits, top_p):
    """Returns the smallest logit of the smallest set with probability `top_p`: [batch, vocab_size] -> [batch, 1]."""
    descending, _ = ops.top_k(logits, logits.shape[-1])
    probs = ops.softmax(descending, axis=-1)
    comes_before = ops.cumsum(probs, axis=-1) - probs
    is_needed = comes_before < top_p
    return ops.min(ops.where(is_needed, descending, float("inf")), axis=-1, keepdims=True)
