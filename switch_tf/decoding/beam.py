"""Beam search: the most probable sequences, as far as a few of them at a time can find them."""

import dataclasses

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.decoding.loop import Decoded, check_inputs, ends_of, goes_on_after, loop
from switch_tf.layers import grouping, masks
from switch_tf.ops import dtypes
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Beam:
    """The best sequences that a beam of `num_beams` finds.

    Sequences are ordered by their log probability over ((5 + tokens) / 6)^length_penalty, the end of sequence counted
    (arXiv 1609.08144, section 7; T5's `alpha`). The search ends where no sequence that goes on can pass those that have
    ended, and at `max_length`, where those that have not ended count too. As in Hugging Face's search, a sequence ends
    only where its end is among the `num_beams` best candidates.

    Args:
        num_beams: int.
        length_penalty: float, 0 or above. 0 for the probability as it is; the larger, the longer the sequences.
        num_results: int, at most `num_beams`. How many to return.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    num_results: int = 1

    def __post_init__(self):
        checks.fields(self, ["num_beams", "num_results"], checks.integer, 1)
        checks.fields(self, ["length_penalty"], checks.number, "0 or above")
        if self.num_results > self.num_beams:
            raise Refusal(f"num_results must be at most num_beams, {self.num_beams}, not {self.num_results}.")

    def decode(self, model, features, max_length: int, end_id=None, rows=None) -> Decoded:
        """`num_results` sequences of each row; arguments as of `loop.decode`. `rows` plays no part: nothing is drawn.

        Raises:
            Refusal: a vocabulary of fewer tokens than twice the beams.
        """
        max_length = check_inputs(model, features, max_length)
        ends = ends_of(model, end_id)
        beams, vocab_size = self.num_beams, model.config.vocab_size
        num_candidates = self._num_candidates(ends, vocab_size)
        batch = ops.shape(features["encoder_input_tokens"])[0]
        is_text = ops.any(masks.encoder_is_real(features), axis=1)
        places = partitioning.arange(max_length)

        def step(cross_cache, position, last, is_open, alive, alive_scores, ended, ended_scores, cache):
            is_real = ops.repeat(is_open, beams, axis=0)
            logits, cache = model.decode_step(ops.reshape(last, (-1,)), is_real, cache, position, cross_cache)
            candidates = ops.reshape(ops.log_softmax(logits, axis=-1), (batch, beams, vocab_size))
            scores, index = ops.top_k(
                ops.reshape(alive_scores[..., None] + candidates, (batch, beams * vocab_size)), num_candidates)
            parent, token = index // vocab_size, ops.cast(index % vocab_size, "int32")
            ids = ops.where(ops.equal(places, position), token[..., None], _of(alive, parent))
            can_go_on = goes_on_after(token, ends)
            has_ended = ops.logical_or(ops.logical_not(can_go_on), position + 1 == max_length)
            # Those that have ended, old and new; a row that is closed keeps its own.
            counts = ops.logical_and(ops.logical_and(has_ended, partitioning.arange(num_candidates) < beams),
                                     is_open[:, None])
            new_scores = ops.where(counts, scores / self._penalty(position + 1), -float("inf"))
            ended_scores, best = ops.top_k(ops.concatenate([ended_scores, new_scores], axis=1), beams)
            ended = _of(ops.concatenate([ended, ids], axis=1), best)
            # Those that go on.
            alive_scores, best = ops.top_k(ops.where(can_go_on, scores, -float("inf")), beams)
            alive, last, parent = _of(ids, best), _of(token, best), _of(parent, best)
            row = ops.cast(parent, "int32") + partitioning.arange(batch)[:, None] * beams
            cache = keras.tree.map_structure(lambda one: ops.take(one, ops.reshape(row, (-1,)), axis=0), cache)
            can_pass = alive_scores[:, 0] / self._penalty(max_length) > ended_scores[:, -1]
            return (position + 1, last, ops.logical_and(is_open, can_pass), alive, alive_scores, ended, ended_scores,
                    cache)

        def goes_on(position, last, is_open, *_):
            return ops.logical_and(position < max_length, ops.any(is_open))

        with grouping.no_drop():
            cross_cache, cache = model.prefill(features, max_length)
            cross_cache, cache = keras.tree.map_structure(
                lambda cached: ops.repeat(cached, beams, axis=0), (cross_cache, cache))
            nothing = ops.zeros((batch, beams, max_length), "int32")
            none = ops.full((batch, beams), -float("inf"), dtypes.wide_dtype(model.compute_dtype))
            first = ops.where(partitioning.arange(beams) == 0, 0.0, none)  # all beams begin alike
            start = (ops.convert_to_tensor(0, "int32"), nothing[..., 0], is_text, nothing, first, nothing, none, cache)
            num_rows = features["encoder_input_tokens"].shape[0]
            *_, ended, ended_scores, _ = loop(model, goes_on, step, cross_cache, start,
                                           num_rows and beams * num_rows)
        ids = ops.where(is_text[:, None, None], ended, 0)[:, :self.num_results]
        return Decoded(ids, ops.where(is_text[:, None], ended_scores, 0.0)[:, :self.num_results])

    def ids(self, model, features, max_length: int, end_id=None, rows=None):
        """The `ids` of the best sequence that `decode` returns, <int32>[batch, max_length]."""
        return self.decode(model, features, max_length, end_id).ids[:, 0]

    def _num_candidates(self, ends, vocab_size):
        """How many candidates a step looks at: even if all ends are among them for each beam, enough go on."""
        if 2 * self.num_beams > vocab_size:
            raise Refusal(f"num_beams must be at most {vocab_size // 2}, half of the vocabulary, not "
                          f"{self.num_beams}.")
        return self.num_beams * min(vocab_size, 1 + max(1, len(set(ends))))

    def _penalty(self, length):
        return ((5.0 + ops.cast(length, "float32")) / 6.0) ** self.length_penalty


def _of(entries, index):
    """Entries by index in each row: [batch, entry, ...], <int>[batch, chosen] -> [batch, chosen, ...]."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(entries.shape) - 2)))
    return ops.take_along_axis(entries, index, axis=1)
