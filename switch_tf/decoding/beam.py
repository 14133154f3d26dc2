"""Beam search."""

import dataclasses
from typing import Any, NamedTuple

import keras
from keras import ops

from switch_tf import checks, context, partitioning
from switch_tf.decoding.loop import Decoded, check_inputs, continues_after, end_ids, run_loop
from switch_tf.layers import masks
from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Beam:
    """Beam search with T5's length penalty.

    Sequences are ranked by log probability / ((5 + tokens) / 6)^length_penalty, counting the end of sequence (arXiv
    1609.08144, section 7; T5's `alpha`). The search of a row ends when no live sequence can pass the finished ones, or
    at `max_length`, where live sequences count as finished. As in Hugging Face's search, a sequence finishes only if
    its end is among the `num_beams` best candidates.

    Args:
        num_beams: int, at least 1. Number of live sequences.
        length_penalty: float, 0 or above. 0 ranks by probability. Larger values favour longer sequences.
        num_results: int, at least 1 and at most `num_beams`. Number of sequences to return.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    num_results: int = 1

    def __post_init__(self):
        checks.fields(self, ["num_beams", "num_results"], checks.integer, 1)
        checks.fields(self, ["length_penalty"], checks.number, "0 or above")
        if self.num_results > self.num_beams:
            raise Refusal(f"num_results must be at most num_beams, {self.num_beams}, not {self.num_results}.")

    def decode(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
               end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Decoded:
        """Returns the best `num_results` sequences of each row.

        Args:
            model, features, max_length, end_id: See `loop.decode`.
            rows: Ignored, because nothing is sampled.

        Raises:
            Refusal: a vocabulary with fewer than twice as many tokens as beams.
        """
        max_length = check_inputs(model, features, max_length)
        search = _Search(self, model, max_length, end_ids(model, end_id))
        num_rows = features["encoder_input_tokens"].shape[0]
        with context.within(no_drop=True):
            cross_cache, start = search.start(features)
            end = run_loop(model, search.continues, search.step, cross_cache, start,
                           num_rows and self.num_beams * num_rows)
        is_text = ops.any(masks.encoder_is_real(features), axis=1)
        ids = ops.where(is_text[:, None, None], end.finished_ids, 0)[:, :self.num_results]
        return Decoded(ids, ops.where(is_text[:, None], end.finished_scores, 0.0)[:, :self.num_results])

    def ids(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
            end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Tensor:
        """Returns the ids of the best sequence of each row, <int32>[batch, max_length]. Arguments as for `decode`."""
        return self.decode(model, features, max_length, end_id).ids[:, 0]


class _State(NamedTuple):
    """Loop state of a search.

    Attributes:
        position: <int32> scalar. Position of `tokens`.
        tokens: <int32>[batch, beam]. Last token of each live sequence.
        is_open: <bool>[batch]. Whether the search of a row continues.
        live_ids: <int32>[batch, beam, max_length]. Sequences that may be extended, best first.
        live_scores: <float32>[batch, beam]. Their log probabilities.
        finished_ids: <int32>[batch, beam, max_length]. Best finished sequences, best first.
        finished_scores: <float32>[batch, beam]. Their scores with length penalty, -inf for empty places.
        cache: Self-attention cache of the live sequences, with `batch * beam` rows.
    """

    position: Any
    tokens: Any
    is_open: Any
    live_ids: Any
    live_scores: Any
    finished_ids: Any
    finished_scores: Any
    cache: Any


class _Search:
    """One beam search: its start, step and end.

    Args:
        beam: Beam.
        model: SwitchTransformer.
        max_length: int. Maximum number of tokens.
        ends: tuple of int. Ids that end a sequence.
    """

    def __init__(self, beam, model, max_length, ends):
        self._num_beams, self._length_penalty = beam.num_beams, beam.length_penalty
        self._model, self._max_length, self._ends = model, max_length, ends
        self._vocab_size = model.config.vocab_size
        if 2 * beam.num_beams > self._vocab_size:
            raise Refusal(f"num_beams must be at most {self._vocab_size // 2}, half of the vocabulary, not "
                          f"{beam.num_beams}.")
        # Even if every end is a candidate of every beam, enough candidates remain to extend.
        self._num_candidates = beam.num_beams * min(self._vocab_size, 1 + max(1, len(set(ends))))

    def start(self, features):
        """Returns the cross-attention cache, repeated for each beam, and the first state."""
        beams, batch = self._num_beams, ops.shape(features["encoder_input_tokens"])[0]
        cross_cache, cache = keras.tree.map_structure(
            lambda cached: ops.repeat(cached, beams, axis=0), self._model.prefill(features, self._max_length))
        no_ids = ops.zeros((batch, beams, self._max_length), "int32")
        no_scores = ops.full((batch, beams), -float("inf"), dtypes.wide_dtype(self._model.compute_dtype))
        # All beams start alike, so only the first may be extended.
        live_scores = ops.where(partitioning.arange(beams) == 0, 0.0, no_scores)
        is_text = ops.any(masks.encoder_is_real(features), axis=1)
        return cross_cache, _State(ops.convert_to_tensor(0, "int32"), no_ids[..., 0], is_text, no_ids, live_scores,
                                   no_ids, no_scores, cache)

    def continues(self, state):
        """Returns whether any row is still searched, <bool> scalar."""
        return ops.logical_and(state.position < self._max_length, ops.any(state.is_open))

    def step(self, cross_cache, state):
        """Extends every live sequence by one token and returns the next state."""
        scores, parent, tokens, cache = self._candidates(cross_cache, state)
        is_new = ops.equal(partitioning.arange(self._max_length), state.position)
        ids = ops.where(is_new, tokens[..., None], _gather(state.live_ids, parent))
        can_continue = continues_after(tokens, self._ends)

        is_finished = ops.logical_or(ops.logical_not(can_continue), state.position + 1 == self._max_length)
        is_finished = ops.logical_and(is_finished, partitioning.arange(self._num_candidates) < self._num_beams)
        is_finished = ops.logical_and(is_finished, state.is_open[:, None])
        new_scores = ops.where(is_finished, scores / self._penalty(state.position + 1), -float("inf"))
        finished_scores, best = ops.top_k(
            ops.concatenate([state.finished_scores, new_scores], axis=1), self._num_beams)
        finished_ids = _gather(ops.concatenate([state.finished_ids, ids], axis=1), best)

        live_scores, best = ops.top_k(ops.where(can_continue, scores, -float("inf")), self._num_beams)
        ids, tokens, parent = (_gather(entries, best) for entries in (ids, tokens, parent))
        batch = ops.shape(tokens)[0]
        cache_row = ops.cast(parent, "int32") + partitioning.arange(batch)[:, None] * self._num_beams
        cache = keras.tree.map_structure(lambda cached: ops.take(cached, ops.reshape(cache_row, (-1,)), axis=0), cache)
        can_pass = live_scores[:, 0] / self._penalty(self._max_length) > finished_scores[:, -1]
        return _State(state.position + 1, tokens, ops.logical_and(state.is_open, can_pass), ids, live_scores,
                      finished_ids, finished_scores, cache)

    def _candidates(self, cross_cache, state):
        """Returns log probabilities, parents and tokens of the best extensions, [batch, candidate], and the cache."""
        batch, beams = ops.shape(state.tokens)[0], self._num_beams
        logits, cache = self._model.decode_step(
            ops.reshape(state.tokens, (-1,)), ops.repeat(state.is_open, beams, axis=0), state.cache, state.position,
            cross_cache)
        log_probs = ops.reshape(ops.log_softmax(logits, axis=-1), (batch, beams, self._vocab_size))
        scores, index = ops.top_k(ops.reshape(state.live_scores[..., None] + log_probs,
                                              (batch, beams * self._vocab_size)), self._num_candidates)
        return scores, index // self._vocab_size, ops.cast(index % self._vocab_size, "int32"), cache

    def _penalty(self, length):
        length = ops.cast(length, dtypes.wide_dtype(self._model.compute_dtype))
        return ((5.0 + length) / 6.0) ** self._length_penalty


def _gather(entries, index):
    """Gathers entries of each row: [batch, entry, ...], <int>[batch, chosen] -> [batch, chosen, ...]."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(entries.shape) - 2)))
    return ops.take_along_axis(entries, index, axis=1)
