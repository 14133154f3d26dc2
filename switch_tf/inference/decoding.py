"""Greedy decoding: the most probable token of each step, until every sequence has ended."""

from keras import ops

from switch_tf import checks, partitioning, policies
from switch_tf.layers import grouping, masks

END_ID = 1  # of the vocabularies of T5, mT5, ByT5, and those that `switch-tf vocabulary` trains


def check_decodes(config) -> None:
    """Refuses a model that cannot predict one token after the other.

    Raises:
        ValueError: it has no decoder, or experts of its decoder choose among tokens that are not there yet.
    """
    if config.is_encoder_only:
        raise checks.refusal("This model has no decoder (num_decoder_layers is 0), so it predicts no text.")
    if config.decoder_sparse_layers and policies.get(config.decoder_policy).experts_choose:
        raise checks.refusal(f"Experts of this decoder choose among all tokens of a batch "
                             f"({config.decoder_policy!r}), and those that are not decoded yet cannot be "
                             "chosen; a decoder needs a policy such as decoder_routing_policy='switch'.")


def greedy(model, features, max_length: int, end_id: int = END_ID):
    """Decodes; no expert drops a token but of an encoder with semantics="hf", see `grouping.every_token_served`.

    Args:
        model: SwitchTransformer, built.
        features: dict with `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.
        max_length: int, tokens to decode at most, the end of the sequence included.
        end_id: int, of the vocabulary's end of sequence.

    Returns:
        <int32>[batch, max_length], up to and with the end of each sequence, then zeros; all zeros where a row of the
        inputs is nothing but padding.
    """
    check_decodes(model.config)
    if "encoder_segment_ids" in features:
        raise checks.refusal("Packed inputs have several outputs each; decode from batches that are not packed.")
    max_length = checks.integer("max_length", max_length, at_least=1)
    tokens = features["encoder_input_tokens"]
    with grouping.every_token_served():
        memory, past = model.prefill(features, max_length)
        places = partitioning.arange(max_length)

        def step(position, last, is_open, ids, past):
            logits, past = model.decode_step(last, is_open, past, position, memory)
            chosen = ops.where(is_open, partitioning.place_of_largest(logits), 0)
            ids = ops.where(ops.equal(places, position), chosen[:, None], ids)
            return position + 1, chosen, ops.logical_and(is_open, chosen != end_id), ids, past

        def goes_on(position, last, is_open, ids, past):
            return ops.logical_and(position < max_length, ops.any(is_open))

        start = (ops.convert_to_tensor(0, "int32"), ops.zeros_like(tokens[:, 0]),
                 ops.any(masks.encoder_is_real(features), axis=1), ops.zeros((tokens.shape[0], max_length), "int32"),
                 past)
        return ops.while_loop(goes_on, step, start)[3]


def log_likelihoods(model, features):
    """How probable each sequence of targets is to a model that reads its inputs: <float32>[batch], in nats.

    Args:
        model: SwitchTransformer, built.
        features: as for `model.forward`, not packed, with `decoder_target_tokens` and `decoder_loss_weights`.
    """
    with grouping.every_token_served():
        logits, _ = model.forward(features, training=False)
    normalizer, target_logit, _ = partitioning.normalizers_and_targets(logits, features["decoder_target_tokens"])
    weights = ops.cast(features["decoder_loss_weights"], logits.dtype)
    return ops.sum((target_logit - normalizer) * weights, axis=-1)
