"""The loop of decoding: a step for each token, until every sequence has ended."""

import functools
from typing import Any, NamedTuple

from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import grouping, masks
from switch_tf.ops import dtypes, forms, indexing
from switch_tf.refusals import Refusal

END_ID = SwitchConfig.end_id  # of the vocabularies of T5, mT5, ByT5, and those that `switch-tf vocabulary` trains
_BUCKET = 32
_FUSED_ROWS = 8  # beyond, products take most of the time, and steps that look kernels up for each row read too many


class Decoded(NamedTuple):
    """What was decoded of each row of a batch, the best result first.

    `ids`: <int32>[batch, result, max_length], up to and with the end of each sequence, then zeros; all zeros where a
        row of the inputs is nothing but padding.
    `scores`: <float32>[batch, result], the logarithm of the sequence's probability, in nats, or what a length penalty
        makes of it.
    """

    ids: Any
    scores: Any


def bucketed_length(length: int) -> int:
    """The multiple of 32 to which inputs are filled up, so that not every length has a program of its own."""
    return length + -length % _BUCKET


def check_decodes(config) -> None:
    """Refuses a model that cannot predict one token after the other.

    Raises:
        Refusal: it has no decoder, or experts of its decoder choose among tokens that are not there yet.
    """
    if config.is_encoder_only:
        raise Refusal("This model has no decoder (num_decoder_layers is 0), so it predicts no text.")
    if config.decoder_sparse_layers and policies.get(config.decoder_policy).experts_choose:
        raise Refusal(f"Experts of this decoder choose among all tokens of a batch "
                      f"({config.decoder_policy!r}), and those that are not decoded yet cannot be "
                      "chosen; a decoder needs a policy such as decoder_routing_policy='switch'.")


def check_inputs(model, features, max_length, any_layout=False) -> int:
    """What every way of decoding refuses; returns `max_length` as an int."""
    check_decodes(model.config)
    if partitioning.is_partitioned() and not any_layout:
        raise Refusal("This way of decoding works on one device; under a layout that cuts one program over "
                      "several, Greedy().ids decodes.")
    if "encoder_segment_ids" in features:
        raise Refusal("Packed inputs have several outputs each; decode from batches that are not packed.")
    checks.tensor("encoder_input_tokens", features["encoder_input_tokens"], "int", (None, None))
    return checks.integer("max_length", max_length, at_least=1)


def ends_of(model, end_id) -> tuple[int, ...]:
    """Returns the ids that end a sequence: `end_id`, one or several, or `SwitchConfig.end_id` for None.

    Raises:
        Refusal: no ids.
    """
    ends = model.config.end_id if end_id is None else checks.ids("end_id", end_id)
    return ends if isinstance(ends, tuple) else (ends,)


def goes_on_after(tokens, ends: tuple[int, ...]):
    """Returns whether sequences go on after tokens, <int32>[...]: <bool>[...], False at each of `ends`."""
    if not ends:
        return ops.ones_like(tokens, dtype="bool")
    return functools.reduce(ops.logical_and, [ops.not_equal(tokens, end) for end in ends])


def decode(model, features, max_length: int, end_id, choose, has_scores=True, any_layout=False):
    """Decodes one sequence of each row, whose tokens `choose` picks.

    No expert drops a token, but of an encoder with semantics="hf", see `grouping.no_drop`.

    Args:
        model: SwitchTransformer, built.
        features: dict with `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.
        max_length: int, tokens to decode at most, the end of the sequence included.
        end_id: int or tuple of int, the ends of a sequence; None for `SwitchConfig.end_id`.
        choose: function of <float32>[batch, vocab_size] logits and of the <int32> scalar position of the next token, to
            <int32>[batch].
        has_scores: bool. Otherwise `scores` is None: they cost a pass over the logits.
        any_layout: bool, whether `choose` can where one program is cut over several devices. Scores cannot, and are
            refused there all the same.

    Returns:
        `(ids, scores)`: <int32>[batch, max_length] and <float32>[batch], as of the one result of `Decoded`.
    """
    max_length = check_inputs(model, features, max_length, any_layout and not has_scores)
    ends = ends_of(model, end_id)
    with grouping.no_drop():
        cross_cache, cache = model.prefill(features, max_length)
        places = partitioning.arange(max_length)

        def step(cross_cache, position, last, is_open, ids, cache, *scores):
            logits, cache = model.decode_step(last, is_open, cache, position, cross_cache)
            chosen = ops.where(is_open, choose(logits, position), 0)
            ids = ops.where(ops.equal(places, position), chosen[:, None], ids)
            scores = [one + ops.where(is_open, _log_probability(logits, chosen), 0.0) for one in scores]
            return position + 1, chosen, ops.logical_and(is_open, goes_on_after(chosen, ends)), ids, cache, *scores

        def goes_on(position, last, is_open, *_):
            return ops.logical_and(position < max_length, ops.any(is_open))

        tokens = features["encoder_input_tokens"]
        batch = ops.shape(tokens)[0]
        start = (ops.convert_to_tensor(0, "int32"), ops.cast(ops.zeros_like(tokens[:, 0]), "int32"),
                 ops.any(masks.encoder_is_real(features), axis=1), ops.zeros((batch, max_length), "int32"), cache)
        scores = [ops.zeros((batch,), dtypes.wide_dtype(model.compute_dtype))] if has_scores else []
        _, _, _, ids, _, *scores = loop(model, goes_on, step, cross_cache, (*start, *scores), tokens.shape[0])
    return ids, scores[0] if has_scores else None


def most_fused(model, sampler) -> int:
    """How many sequences are decoded at a time by a program of XLA's at most; 0 where none are, see `loop`."""
    can_be = forms.can_fuse() and model.config.dispatch != "ragged"
    return _FUSED_ROWS // sampler.num_beams if can_be else 0


def loop(model, goes_on, step, cross_cache, start, num_rows):
    """What `start` becomes by steps, while it goes on.

    Args:
        model: SwitchTransformer. One with dispatch="ragged" keeps to it, which XLA cannot compile.
        goes_on, step: functions of the values of `start`, the latter after `cross_cache`, to a bool and to such values.
        cross_cache: what steps read.
        start: tuple of tensors, or of structures of them.
        num_rows: int or None, sequences that are decoded. Few of them make a program of XLA's on CPU: what is between
            the products takes as long as they do there, and XLA fuses it.
    """
    def run(cross_cache, *start):
        return ops.while_loop(goes_on, functools.partial(step, cross_cache), start)

    are_few = num_rows is not None and num_rows <= _FUSED_ROWS
    return forms.fused(run, (cross_cache, *start), are_few and model.config.dispatch != "ragged")


def _log_probability(logits, tokens):
    """Of each row's token: <float32>[batch, vocab_size], <int32>[batch] -> <float32>[batch]."""
    normalizer, logit, _ = indexing.normalizers_and_targets(logits[:, None], tokens[:, None])
    return (logit - normalizer)[:, 0]
