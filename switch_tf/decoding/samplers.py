"""Which token comes next: the most probable one, or one drawn at random."""

import dataclasses

from keras import ops

from switch_tf import checks, partitioning
from switch_tf.decoding.loop import Decoded, decode
from switch_tf.ops import indexing, random


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token of each step."""

    num_beams = 1

    def decode(self, model, features, max_length: int, end_id=None, rows=None) -> Decoded:
        """One sequence of each row; see `loop.decode`. `rows` plays no part: nothing is drawn."""
        return _one_result(decode(model, features, max_length, end_id, _most_probable))

    def ids(self, model, features, max_length: int, end_id=None, rows=None):
        """The `ids` of `decode`, <int32>[batch, max_length], sooner, and under any layout."""
        return decode(model, features, max_length, end_id, _most_probable, has_scores=False, any_layout=True)[0]


def _most_probable(logits, _):
    return indexing.place_of_largest(logits)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Tokens drawn by their probability, from the whole vocabulary or from its most probable part.

    What is drawn is a function of the seed, the row's number and the position: the same whatever the batch that a row
    is decoded in.

    Args:
        temperature: float, above 0. Logits are divided by it: below 1 for more probable tokens than the model's, above
            for less.
        top_k: int or None. From the so many most probable tokens alone (and those as probable as the last of them).
        top_p: float in (0, 1] or None. From the fewest tokens alone that have so much probability together, after
            `top_k` (arXiv 1904.09751).
        seed: int.
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

    def decode(self, model, features, max_length: int, end_id=None, rows=None) -> Decoded:
        """One sequence of each row, see `loop.decode`.

        Args:
            rows: <int32>[batch], the number of each row among all that are decoded; None for 0, 1, 2, ...
        """
        return _one_result(decode(model, features, max_length, end_id, self._choice(rows)))

    def ids(self, model, features, max_length: int, end_id=None, rows=None):
        """What `decode` returns as `ids` of the one sequence, <int32>[batch, max_length], sooner."""
        return decode(model, features, max_length, end_id, self._choice(rows), has_scores=False)[0]

    def _choice(self, rows):
        def choose(logits, position):
            numbers = random.batch_positions(ops.shape(logits)[0]) if rows is None else rows
            return self.draw(logits, numbers, position)

        return choose

    def draw(self, logits, rows, position):
        """A token for each row: <float32>[batch, vocab_size], <int32>[batch], <int32> scalar -> <int32>[batch]."""
        logits = logits / self.temperature
        vocab_size = logits.shape[-1]
        if self.top_k is not None and self.top_k < vocab_size:
            logits = _at_least(logits, ops.top_k(logits, self.top_k)[0][:, -1:])
        if self.top_p is not None and self.top_p < 1:
            logits = _at_least(logits, _least_of(logits, self.top_p))
        # The first of exponential waiting times with these rates. They are precise where they are short, for which
        # 24 random bits would not do: a second draw fills in what lies below the first.
        seed = random.step_seed(self.seed, position)
        below = random.step_seed(self.seed, -1 - position)
        places = partitioning.arange(vocab_size)
        uniform, rest = (random.uniform_at(one, rows[:, None], places) for one in (seed, below))
        waits = -ops.log1p(-(uniform + rest * 2.0**-24) * (1 - 2.0**-24))
        return ops.cast(ops.argmax(logits - ops.log(waits), axis=-1), "int32")


def _one_result(decoded):
    return Decoded(*(one[:, None] for one in decoded))


def _at_least(logits, least):
    return ops.where(logits < least, -float("inf"), logits)


def _least_of(logits, top_p):
    """The smallest logit among the fewest tokens that have `top_p` together: [batch, vocab_size] -> [batch, 1]."""
    descending, _ = ops.top_k(logits, logits.shape[-1])
    probs = ops.softmax(descending, axis=-1)
    comes_before = ops.cumsum(probs, axis=-1) - probs
    is_needed = comes_before < top_p
    return ops.min(ops.where(is_needed, descending, float("inf")), axis=-1, keepdims=True)
