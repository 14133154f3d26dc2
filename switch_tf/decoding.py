"""Token-by-token decoding: greedy, sampling and beam search.

Samplers use only a model's `prefill`, `decode_step`, `config` and dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from switch_tf import checks, context, partitioning
from switch_tf.configs import policies
from switch_tf.configs.choices import check_choice, check_fields
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import masks
from switch_tf.ops import dtypes, forms, indexing, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

END_ID = SwitchConfig.end_id  # of T5, mT5, ByT5 and `switch-tf vocabulary`
_BUCKET = 32
_FUSED_ROWS = 8  # with more, matrix products dominate


class Decoded(NamedTuple):
    """Decoded sequences of each row of a batch, best first.

    Attributes:
        ids: <int32>[batch, result, max_length]. Each sequence through its end, then zeros. All zeros for padding rows.
        scores: <float32>[batch, result]. Log probability in nats, with length penalty for beam search.
    """

    ids: Any
    scores: Any


def bucketed_length(length: int) -> int:
    """Rounds a length up to a multiple of 32, so that nearby lengths share a program."""
    return length + -length % _BUCKET


def check_decodes(config: SwitchConfig) -> None:
    """Raises a Refusal unless a model can decode token by token."""
    if config.is_encoder_only:
        raise Refusal("This model has no decoder (num_decoder_layers is 0), so it predicts no text.")
    if config.decoder_sparse_layers and policies.get(config.decoder_policy).experts_choose:
        raise Refusal(f"Experts of this decoder choose among all tokens of a batch "
                      f"({config.decoder_policy!r}), and those that are not decoded yet cannot be "
                      "chosen; a decoder needs a policy such as decoder_routing_policy='switch'.")


def _continues_after(tokens, ends):
    continues = ops.ones_like(tokens, "bool")
    for end in ends:
        continues = continues & ops.not_equal(tokens, end)
    return continues


def max_fused_sequences(model: keras.Model, sampler: Any) -> int:
    """Returns the maximum number of sequences in a fused program of `run_loop`; 0 if it does not fuse."""
    can_be = forms.can_fuse() and model.config.dispatch != "ragged"
    return _FUSED_ROWS // sampler.num_beams if can_be else 0


def run_loop(model: keras.Model, max_length: int, step: Callable[..., tuple], cross_cache: Any, start: tuple,
             num_rows: int | None) -> tuple:
    """Decodes until all sequences have ended or reached `max_length`, and returns the last state after `start`.

    On CPU a few sequences run in one program of XLA. It fuses the operations between products, which take as long as
    the products otherwise. XLA cannot compile dispatch="ragged".

    Args:
        step: Maps `cross_cache`, the <int32> scalar position of the last tokens, and the tensors of the state to the
            next state.
        start: Its first tensor is <bool>[batch], whether a sequence continues.
        num_rows: Sequences decoded at once, if known.
    """
    def continues(state):
        return (state[0] < max_length) & ops.any(state[1])

    def run(cross_cache, start):
        (end,) = ops.while_loop(continues, lambda state: ((state[0] + 1, *step(cross_cache, *state)),), (start,))
        return end

    are_few = num_rows is not None and num_rows <= _FUSED_ROWS
    start = ops.convert_to_tensor(0, "int32"), *start
    return forms.fused(run, (cross_cache, start), are_few and model.config.dispatch != "ragged")[1:]


def _log_probs(logits, tokens):
    normalizer, logit, _ = indexing.normalizers_and_targets(logits, tokens)
    return logit - normalizer


def log_likelihoods(model: keras.Model, features: dict[str, Tensor]) -> Tensor:
    """Computes the log probability of each target sequence given its inputs, <float32>[batch], in nats.

    `features` are as for `model.forward`, not packed, with `decoder_target_tokens` and `decoder_loss_weights`.
    """
    with context.within(no_drop=True):
        logits, _ = model.forward(features, training=False)
    weights = ops.cast(features["decoder_loss_weights"], logits.dtype)
    return ops.sum(_log_probs(logits, features["decoder_target_tokens"]) * weights, axis=-1)


class Sampler:
    """Base class of the samplers."""

    num_beams = 1
    _any_layout = False
    # `_search` returns ids and scores as in `Decoded`. Without scores, it saves a pass over the logits and returns only
    # the best <int32>[batch, max_length], and None: DTensor cannot slice them out of all results.

    def decode(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
               end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Decoded:
        """Decodes the best sequences of each row: `num_results` of a `Beam`, otherwise one.

        Experts drop no tokens, except in encoders with semantics="hf".

        Args:
            features: With `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.
            max_length: Maximum number of decoded tokens, including the end of sequence.
            end_id: Ids that end a sequence. None for `SwitchConfig.end_id`.
            rows: <int32>[batch]. Number of each row among all decoded rows, for `Sample`. None for 0, 1, 2, ...
        """
        return Decoded(*self._run(model, features, max_length, end_id, rows))

    def ids(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
            end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Tensor:
        """Decodes the ids of the best sequence of each row, <int32>[batch, max_length]. Arguments as for `decode`.

        Faster than `decode`, except for `Beam`: it needs scores. `Greedy` works under any layout.
        """
        return self._run(model, features, max_length, end_id, rows, has_scores=False)[0]

    def _run(self, model, features, max_length, end_id, rows, has_scores=True):
        check_decodes(model.config)
        # Scores do not work in a program that DTensor cuts over devices.
        if partitioning.is_partitioned() and not partitioning.is_for_compiler() and (
                has_scores or not self._any_layout):
            raise Refusal("This way of decoding works on one device; under a layout that DTensor cuts over several, "
                          "Greedy().ids decodes.")
        if "encoder_segment_ids" in features:
            raise Refusal("Packed inputs have several outputs each; decode from batches that are not packed.")
        checks.tensor("encoder_input_tokens", features["encoder_input_tokens"], "int", (None, None))
        ends = model.config.end_id if end_id is None else checks.ids("end_id", end_id, model.config.vocab_size)
        max_length = checks.integer("max_length", max_length, at_least=1)
        with context.within(no_drop=True):
            return self._search(model, features, max_length, ends if isinstance(ends, tuple) else (ends,), rows,
                                has_scores)


class _TokenByToken(Sampler):
    def _search(self, model, features, max_length, ends, rows, has_scores):
        cross_cache, cache = model.prefill(features, max_length)
        places = partitioning.arange(max_length)

        def step(cross_cache, position, is_open, tokens, ids, cache, scores):
            logits, cache = model.decode_step(tokens, is_open, cache, position, cross_cache)
            tokens = ops.where(is_open, self._choose(rows, logits, position), 0)
            ids = ops.where(ops.equal(places, position), tokens[:, None], ids)
            if has_scores:
                scores += ops.where(is_open, _log_probs(logits[:, None], tokens[:, None])[:, 0], 0.0)
            return is_open & _continues_after(tokens, ends), tokens, ids, cache, scores

        inputs = features["encoder_input_tokens"]
        batch = ops.shape(inputs)[0]
        # Per sequence: whether it continues, its last token, its tokens so far and their log probability.
        _, _, ids, _, scores = run_loop(model, max_length, step, cross_cache, (
            ops.any(masks.encoder_is_real(features), axis=1), ops.cast(ops.zeros_like(inputs[:, 0]), "int32"),
            ops.zeros((batch, max_length), "int32"), cache,
            ops.zeros((batch,), dtypes.wide_dtype(model.compute_dtype)) if has_scores else ()), inputs.shape[0])
        return (ids[:, None], scores[:, None]) if has_scores else (ids, None)


@dataclasses.dataclass(frozen=True)
class Greedy(_TokenByToken):
    """Decoding with the most probable token at each step."""

    _any_layout = True

    def _choose(self, rows, logits, position):
        return indexing.place_of_largest(logits)


@dataclasses.dataclass(frozen=True)
class Sample(_TokenByToken):
    """Sampling from the model's distribution, optionally limited to the most probable tokens.

    A sample depends only on the seed, the row's number and the position.

    Args:
        temperature: Above 0. Divides the logits. Values below 1 favour likely tokens.
        top_k: Sample from this many most probable tokens, including ties with the last.
        top_p: In (0, 1]. Sample from the smallest set of most probable tokens with this total probability, after
            `top_k` (arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_fields(self, {"temperature": "above 0", "top_k": 1, "top_p": "in (0, 1]", "seed": 0})

    def _choose(self, rows, logits, position):
        return self.draw(logits, random.batch_positions(ops.shape(logits)[0]) if rows is None else rows, position)

    def draw(self, logits: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        """Samples a token per row: <float32>[batch, vocab_size], <int32>[batch], <int32> scalar -> <int32>[batch]."""
        logits = logits / self.temperature
        vocab_size = logits.shape[-1]
        if self.top_k is not None and self.top_k < vocab_size:
            logits = ops.where(logits < ops.top_k(logits, self.top_k)[0][:, -1:], -float("inf"), logits)
        if self.top_p is not None and self.top_p < 1:
            descending, _ = ops.top_k(logits, vocab_size)
            probs = ops.softmax(descending, axis=-1)
            is_needed = ops.cumsum(probs, axis=-1) - probs < self.top_p  # by the probability of the tokens before
            smallest = ops.min(ops.where(is_needed, descending, float("inf")), axis=-1, keepdims=True)
            logits = ops.where(logits < smallest, -float("inf"), logits)
        # The shortest exponential waiting time. Short times need more than 24 bits, from a second draw.
        seed = random.step_seed(self.seed, position)
        below = random.step_seed(self.seed, -1 - position)
        places = partitioning.arange(vocab_size)
        uniform, rest = (random.uniform_at(draw, rows[:, None], places) for draw in (seed, below))
        waits = -ops.log1p(-(uniform + rest * 2.0**-24) * (1 - 2.0**-24))
        return ops.cast(ops.argmax(logits - ops.cast(ops.log(waits), logits.dtype), axis=-1), "int32")


@dataclasses.dataclass(frozen=True)
class Beam(Sampler):
    """Beam search with T5's length penalty.

    Ranks by log probability / ((5 + tokens) / 6)^length_penalty, counting the end of sequence (arXiv 1609.08144,
    section 7; T5's `alpha`). A row's search ends when no live sequence can pass the finished ones, or at `max_length`,
    where live sequences count as finished. As in Hugging Face, a sequence finishes only if its end is among the
    `num_beams` best candidates.

    Args:
        num_beams: Number of live sequences.
        length_penalty: 0 or above. 0 ranks by probability. Larger values favour longer sequences.
        num_results: Number of sequences to return, at most `num_beams`.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    num_results: int = 1

    def __post_init__(self):
        check_fields(self, {"num_beams": 1, "length_penalty": "0 or above", "num_results": 1})
        if self.num_results > self.num_beams:
            raise Refusal(f"num_results must be at most num_beams, {self.num_beams}, not {self.num_results}.")

    def _search(self, model, features, max_length, ends, rows, has_scores):
        beams, vocab_size, wide = self.num_beams, model.config.vocab_size, dtypes.wide_dtype(model.compute_dtype)
        if 2 * beams > vocab_size:
            raise Refusal(f"num_beams must be at most {vocab_size // 2}, half of the vocabulary, not {beams}.")
        # Enough candidates to extend even if every end is a candidate of every beam.
        num_candidates = beams * min(vocab_size, 1 + max(1, len(set(ends))))

        def penalty(length):
            return ((5.0 + ops.cast(length, wide)) / 6.0) ** self.length_penalty

        def step(cross_cache, position, is_open, tokens, live_ids, live_scores, finished_ids, finished_scores, cache):
            batch = ops.shape(tokens)[0]
            logits, cache = model.decode_step(
                ops.reshape(tokens, (-1,)), ops.repeat(is_open, beams, axis=0), cache, position,
                cross_cache)
            log_probs = ops.reshape(ops.log_softmax(logits, axis=-1), (batch, beams, vocab_size))
            # [batch, beam, vocab_size] -> [batch, candidate], the best extensions
            scores, index = ops.top_k(
                ops.reshape(live_scores[..., None] + log_probs, (batch, beams * vocab_size)), num_candidates)
            parent, tokens = index // vocab_size, index % vocab_size
            is_new = ops.equal(partitioning.arange(max_length), position)
            ids = ops.where(is_new, tokens[..., None], _gather(live_ids, parent))
            can_continue = _continues_after(tokens, ends)

            is_finished = ~can_continue | (position + 1 == max_length)
            is_finished = is_finished & (partitioning.arange(num_candidates) < beams) & is_open[:, None]
            new_scores = ops.where(is_finished, scores / penalty(position + 1), -float("inf"))
            finished_scores, best = ops.top_k(ops.concatenate([finished_scores, new_scores], axis=1), beams)
            finished_ids = _gather(ops.concatenate([finished_ids, ids], axis=1), best)

            live_scores, best = ops.top_k(ops.where(can_continue, scores, -float("inf")), beams)
            ids, tokens, parent = (_gather(entries, best) for entries in (ids, tokens, parent))
            cache_row = parent + partitioning.arange(batch)[:, None] * beams
            cache = keras.tree.map_structure(
                lambda cached: ops.take(cached, ops.reshape(cache_row, (-1,)), axis=0), cache)
            can_pass = live_scores[:, 0] / penalty(max_length) > finished_scores[:, -1]
            return (is_open & can_pass, tokens, ids, live_scores, finished_ids, finished_scores, cache)

        inputs = features["encoder_input_tokens"]
        batch, num_rows = ops.shape(inputs)[0], inputs.shape[0]
        is_text = ops.any(masks.encoder_is_real(features), axis=1)
        cross_cache, cache = keras.tree.map_structure(
            lambda cached: ops.repeat(cached, beams, axis=0), model.prefill(features, max_length))
        no_ids = ops.zeros((batch, beams, max_length), "int32")
        no_scores = ops.full((batch, beams), -float("inf"), wide)
        # All beams start equal, so only the first may be extended.
        live_scores = ops.where(partitioning.arange(beams) == 0, 0.0, no_scores)
        # Per row: whether its search continues; last tokens, [batch, beam], tokens and log probabilities of live
        # sequences, best first; finished sequences and scores, -inf for empty places.
        *_, finished_ids, finished_scores, _ = run_loop(
            model, max_length, step, cross_cache,
            (is_text, no_ids[..., 0], no_ids, live_scores, no_ids, no_scores, cache), num_rows and beams * num_rows)
        ids = ops.where(is_text[:, None, None], finished_ids, 0)[:, :self.num_results]
        if not has_scores:
            return ids[:, 0], None
        return ids, ops.where(is_text[:, None], finished_scores, 0.0)[:, :self.num_results]


def _gather(entries, index):
    """[batch, entry, ...], <int>[batch, chosen] -> [batch, chosen, ...]."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(entries.shape) - 2)))
    return ops.take_along_axis(entries, index, axis=1)


SAMPLERS = {"greedy": Greedy, "sample": Sample, "beam": Beam}


def get_sampler(sampler: str | Sampler) -> Sampler:
    """Returns a sampler unchanged, or the sampler of a name with default arguments."""
    if isinstance(sampler, Sampler):
        return sampler
    check_choice("sampler", sampler, tuple(SAMPLERS))
    return SAMPLERS[sampler]()
