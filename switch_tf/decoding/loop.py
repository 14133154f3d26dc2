"""The decoding loop, one step per token until every sequence has ended, and samplers of one token at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from switch_tf import checks, context, partitioning
from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import masks
from switch_tf.ops import dtypes, forms, indexing, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

END_ID = SwitchConfig.end_id  # in the vocabularies of T5, mT5 and ByT5, and in those trained by `switch-tf vocabulary`
_BUCKET = 32
_FUSED_ROWS = 8  # with more, matrix products take most of the time, and looking kernels up by row reads too much


class Decoded(NamedTuple):
    """Decoded sequences of each row of a batch, best first.

    Attributes:
        ids: <int32>[batch, result, max_length]. Each sequence up to and including its end, then zeros. All zeros for a
            row of padding.
        scores: <float32>[batch, result]. Log probability in nats, with length penalty for beam search.
    """

    ids: Any
    scores: Any


class _State(NamedTuple):
    """Loop state of `decode`.

    Attributes:
        position: <int32> scalar. Position of `tokens`.
        tokens: <int32>[batch]. Last token of each sequence.
        is_open: <bool>[batch]. Whether a sequence continues.
        ids: <int32>[batch, max_length]. Tokens decoded so far, then zeros.
        cache: Self-attention cache.
        scores: <float32>[batch], log probabilities of `ids`, or an empty tuple without scores.
    """

    position: Any
    tokens: Any
    is_open: Any
    ids: Any
    cache: Any
    scores: Any


def bucketed_length(length: int) -> int:
    """Rounds an input length up to a multiple of 32, so that nearby lengths share a program."""
    return length + -length % _BUCKET


def check_decodes(config: SwitchConfig) -> None:
    """Raises a Refusal unless a model can decode token by token."""
    if config.is_encoder_only:
        raise Refusal("This model has no decoder (num_decoder_layers is 0), so it predicts no text.")
    if config.decoder_sparse_layers and policies.get(config.decoder_policy).experts_choose:
        raise Refusal(f"Experts of this decoder choose among all tokens of a batch "
                      f"({config.decoder_policy!r}), and those that are not decoded yet cannot be "
                      "chosen; a decoder needs a policy such as decoder_routing_policy='switch'.")


def check_inputs(model: keras.Model, features: dict[str, Tensor], max_length: int, end_id: int | tuple[int, ...] | None,
                 any_layout: bool = False) -> tuple[int, tuple[int, ...]]:
    """Checks the arguments shared by all samplers; returns `max_length` as an int and the ids that end a sequence."""
    check_decodes(model.config)
    if partitioning.is_partitioned() and not (any_layout or partitioning.is_for_compiler()):
        raise Refusal("This way of decoding works on one device; under a layout that DTensor cuts over several, "
                      "Greedy().ids decodes.")
    if "encoder_segment_ids" in features:
        raise Refusal("Packed inputs have several outputs each; decode from batches that are not packed.")
    checks.tensor("encoder_input_tokens", features["encoder_input_tokens"], "int", (None, None))
    ends = model.config.end_id if end_id is None else checks.ids("end_id", end_id, model.config.vocab_size)
    return checks.integer("max_length", max_length, at_least=1), ends if isinstance(ends, tuple) else (ends,)


def continues_after(tokens: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Returns whether sequences continue after tokens, <int32>[...]: <bool>[...], False at each of `ends`."""
    if not ends:
        return ops.ones_like(tokens, dtype="bool")
    return functools.reduce(ops.logical_and, [ops.not_equal(tokens, end) for end in ends])


def decode(model: keras.Model, features: dict[str, Tensor], max_length: int, end_id: int | tuple[int, ...] | None,
           choose: Callable[[Tensor, Tensor], Tensor], has_scores: bool = True,
           any_layout: bool = False) -> tuple[Tensor, Tensor | None]:
    """Decodes one sequence per row, with `choose` picking each token.

    Experts drop no tokens, except in encoders with semantics="hf". See `context.Context.no_drop`.

    Args:
        model: SwitchTransformer, built.
        features: dict with `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.
        max_length: int. Maximum number of decoded tokens, including the end of sequence.
        end_id: int or tuple of int. Ids that end a sequence. None for `SwitchConfig.end_id`.
        choose: function of <float32>[batch, vocab_size] logits and the <int32> scalar position of the next token that
            returns <int32>[batch].
        has_scores: bool. Whether to compute scores, which cost a pass over the logits.
        any_layout: bool. Whether `choose` works in a program that DTensor cuts over devices. Scores do not work there.

    Returns:
        `(ids, scores)`: <int32>[batch, max_length] and <float32>[batch] or None, as one result of `Decoded`.
    """
    max_length, ends = check_inputs(model, features, max_length, end_id, any_layout)
    with context.within(no_drop=True):
        cross_cache, cache = model.prefill(features, max_length)
        places = partitioning.arange(max_length)

        def step(cross_cache, state):
            logits, cache = model.decode_step(state.tokens, state.is_open, state.cache, state.position, cross_cache)
            tokens = ops.where(state.is_open, choose(logits, state.position), 0)
            ids = ops.where(ops.equal(places, state.position), tokens[:, None], state.ids)
            scores = state.scores
            if has_scores:
                scores += ops.where(state.is_open, _log_probability(logits, tokens), 0.0)
            is_open = ops.logical_and(state.is_open, continues_after(tokens, ends))
            return _State(state.position + 1, tokens, is_open, ids, cache, scores)

        def continues(state):
            return ops.logical_and(state.position < max_length, ops.any(state.is_open))

        inputs = features["encoder_input_tokens"]
        batch = ops.shape(inputs)[0]
        start = _State(ops.convert_to_tensor(0, "int32"), ops.cast(ops.zeros_like(inputs[:, 0]), "int32"),
                       ops.any(masks.encoder_is_real(features), axis=1), ops.zeros((batch, max_length), "int32"), cache,
                       ops.zeros((batch,), dtypes.wide_dtype(model.compute_dtype)) if has_scores else ())
        end = run_loop(model, continues, step, cross_cache, start, inputs.shape[0])
    return end.ids, end.scores if has_scores else None


def max_fused_sequences(model: keras.Model, sampler: Any) -> int:
    """Returns how many sequences `run_loop` decodes at most in a fused program, 0 if it fuses none."""
    can_be = forms.can_fuse() and model.config.dispatch != "ragged"
    return _FUSED_ROWS // sampler.num_beams if can_be else 0


def run_loop(model: keras.Model, continues: Callable[[Any], Tensor], step: Callable[[Any, Any], Any], cross_cache: Any,
             start: NamedTuple, num_rows: int | None) -> Any:
    """Runs `step` while `continues` and returns the last state.

    On CPU a few sequences run in one program compiled by XLA: the operations between their matrix products take as long
    as the products, and XLA fuses them.

    Args:
        model: SwitchTransformer. With dispatch="ragged" it is never fused, because XLA cannot compile that.
        continues: function of the state that returns a <bool> scalar.
        step: function of `cross_cache` and the state that returns the next state.
        cross_cache: Tree of tensors that no step changes.
        start: NamedTuple of tensors and trees of tensors. The first state.
        num_rows: int or None. Number of sequences decoded at once, if known.
    """
    def run(cross_cache, start):
        (end,) = ops.while_loop(continues, lambda state: (step(cross_cache, state),), (start,))
        return end

    are_few = num_rows is not None and num_rows <= _FUSED_ROWS
    return forms.fused(run, (cross_cache, start), are_few and model.config.dispatch != "ragged")


def _log_probability(logits, tokens):
    """Computes log probabilities: <float32>[batch, vocab_size] logits, <int32>[batch] tokens -> <float32>[batch]."""
    normalizer, logit, _ = indexing.normalizers_and_targets(logits[:, None], tokens[:, None])
    return (logit - normalizer)[:, 0]


def log_likelihoods(model: keras.Model, features: dict[str, Tensor]) -> Tensor:
    """Computes the log probability of each target sequence given its inputs.

    Args:
        model: SwitchTransformer, built.
        features: dict as for `model.forward`, not packed, with `decoder_target_tokens` and `decoder_loss_weights`.

    Returns:
        <float32>[batch], in nats.
    """
    with context.within(no_drop=True):
        logits, _ = model.forward(features, training=False)
    normalizer, target_logit, _ = indexing.normalizers_and_targets(logits, features["decoder_target_tokens"])
    weights = ops.cast(features["decoder_loss_weights"], logits.dtype)
    return ops.sum((target_logit - normalizer) * weights, axis=-1)


class _TokenByToken:
    """A sampler with one result, of tokens that `_choose` picks one at a time."""

    num_beams = 1
    _any_layout = False
    _choose: Callable[..., Tensor]

    def decode(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
               end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Decoded:
        """Decodes one sequence per row.

        Args:
            model, features, max_length, end_id: See `loop.decode`.
            rows: <int32>[batch]. Number of each row among all decoded rows, from which `Sample` draws. None for 0, 1,
                2, ...
        """
        decoded = decode(model, features, max_length, end_id, functools.partial(self._choose, rows))
        return Decoded(*(values[:, None] for values in decoded))

    def ids(self, model: keras.Model, features: dict[str, Tensor], max_length: int,
            end_id: int | tuple[int, ...] | None = None, rows: Tensor | None = None) -> Tensor:
        """Decodes ids alone, <int32>[batch, max_length]. Faster than `decode`; `Greedy` works under any layout."""
        return decode(model, features, max_length, end_id, functools.partial(self._choose, rows), has_scores=False,
                      any_layout=self._any_layout)[0]


@dataclasses.dataclass(frozen=True)
class Greedy(_TokenByToken):
    """Decoding with the most probable token at each step."""

    _any_layout = True

    def _choose(self, rows, logits, position):
        return indexing.place_of_largest(logits)


@dataclasses.dataclass(frozen=True)
class Sample(_TokenByToken):
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

    def __post_init__(self):
        checks.fields(self, ["temperature"], checks.number, "above 0")
        checks.fields(self, ["top_k"], checks.optional, checks.integer, 1)
        checks.fields(self, ["top_p"], checks.optional, checks.number, "in (0, 1]")
        checks.fields(self, ["seed"], checks.integer, 0)

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
            is_needed = ops.cumsum(probs, axis=-1) - probs < self.top_p  # by the probability that comes before
            smallest = ops.min(ops.where(is_needed, descending, float("inf")), axis=-1, keepdims=True)
            logits = ops.where(logits < smallest, -float("inf"), logits)
        # The token with the shortest of exponential waiting times. Short times need more than 24 random bits, so a
        # second draw supplies the bits below the first.
        seed = random.step_seed(self.seed, position)
        below = random.step_seed(self.seed, -1 - position)
        places = partitioning.arange(vocab_size)
        uniform, rest = (random.uniform_at(draw, rows[:, None], places) for draw in (seed, below))
        waits = -ops.log1p(-(uniform + rest * 2.0**-24) * (1 - 2.0**-24))
        return ops.cast(ops.argmax(logits - ops.cast(ops.log(waits), logits.dtype), axis=-1), "int32")
