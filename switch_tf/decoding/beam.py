"""Beam search."""

import dataclasses
from typing import Any, NamedTuple

import keras
from keras import ops

from switch_tf import checks, context, partitioning
from switch_tf.decoding.loop import Decoded, check_inputs, continues_after, run_loop
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
        """
        max_length, ends = check_inputs(model, features, max_length, end_id)
        beams, vocab_size, wide = self.num_beams, model.config.vocab_size, dtypes.wide_dtype(model.compute_dtype)
        if 2 * beams > vocab_size:
            raise Refusal(f"num_beams must be at most {vocab_size // 2}, half of the vocabulary, not {beams}.")
        # Even if every end is a candidate of every beam, enough candidates remain to extend.
        num_candidates = beams * min(vocab_size, 1 + max(1, len(set(ends))))

        def penalty(length):
            return ((5.0 + ops.cast(length, wide)) / 6.0) ** self.length_penalty

        def continues(state):
            return ops.logical_and(state.position < max_length, ops.any(state.is_open))

        def step(cross_cache, state):
            batch = ops.shape(state.tokens)[0]
            logits, cache = model.decode_step(
                ops.reshape(state.tokens, (-1,)), ops.repeat(state.is_open, beams, axis=0), state.cache, state.position,
                cross_cache)
            log_probs = ops.reshape(ops.log_softmax(logits, axis=-1), (batch, beams, vocab_size))
            # [batch, beam, vocab_size] -> [batch, candidate], the best extensions
            scores, index = ops.top_k(
                ops.reshape(state.live_scores[..., None] + log_probs, (batch, beams * vocab_size)), num_candidates)
            parent, tokens = index // vocab_size, ops.cast(index % vocab_size, "int32")
            is_new = ops.equal(partitioning.arange(max_length), state.position)
            ids = ops.where(is_new, tokens[..., None], _gather(state.live_ids, parent))
            can_continue = continues_after(tokens, ends)

            is_finished = ops.logical_or(ops.logical_not(can_continue), state.position + 1 == max_length)
            is_finished = ops.logical_and(is_finished, partitioning.arange(num_candidates) < beams)
            is_finished = ops.logical_and(is_finished, state.is_open[:, None])
            new_scores = ops.where(is_finished, scores / penalty(state.position + 1), -float("inf"))
            finished_scores, best = ops.top_k(ops.concatenate([state.finished_scores, new_scores], axis=1), beams)
            finished_ids = _gather(ops.concatenate([state.finished_ids, ids], axis=1), best)

            live_scores, best = ops.top_k(ops.where(can_continue, scores, -float("inf")), beams)
            ids, tokens, parent = (_gather(entries, best) for entries in (ids, tokens, parent))
            cache_row = ops.cast(parent, "int32") + partitioning.arange(batch)[:, None] * beams
            cache = keras.tree.map_structure(
                lambda cached: ops.take(cached, ops.reshape(cache_row, (-1,)), axis=0), cache)
            can_pass = live_scores[:, 0] / penalty(max_length) > finished_scores[:, -1]
            return _State(state.position + 1, tokens, ops.logical_and(state.is_open, can_pass), ids, live_scores,
                          finished_ids, finished_scores, cache)

        inputs = features["encoder_input_tokens"]
        batch, num_rows = ops.shape(inputs)[0], inputs.shape[0]
        is_text = ops.any(masks.encoder_is_real(features), axis=1)
        with context.within(no_drop=True):
            cross_cache, cache = keras.tree.map_structure(
                lambda cached: ops.repeat(cached, beams, axis=0), model.prefill(features, max_length))
            no_ids = ops.zeros((batch, beams, max_length), "int32")
            no_scores = ops.full((batch, beams), -float("inf"), wide)
            # All beams start alike, so only the first may be extended.
            live_scores = ops.where(partitioning.arange(beams) == 0, 0.0, no_scores)
            start = _State(ops.convert_to_tensor(0, "int32"), no_ids[..., 0], is_text, no_ids, live_scores, no_ids,
                           no_scores, cache)
            end = run_loop(model, continues, step, cross_cache, start, num_rows and beams * num_rows)
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


def _gather(entries, index):
    """Gathers entries of each row: [batch, entry, ...], <int>[batch, chosen] -> [batch, chosen, ...]."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(entries.shape) - 2)))
    return ops.take_along_axis(entries, index, axis=1)
