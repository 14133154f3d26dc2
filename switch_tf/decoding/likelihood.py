"""How probable given targets are to a model."""

from keras import ops

from switch_tf.layers import grouping
from switch_tf.ops import indexing


def log_likelihoods(model, features):
    """How probable each sequence of targets is to a model that reads its inputs: <float32>[batch], in nats.

    Args:
        model: SwitchTransformer, built.
        features: as for `model.forward`, not packed, with `decoder_target_tokens` and `decoder_loss_weights`.
    """
    with grouping.no_drop():
        logits, _ = model.forward(features, training=False)
    normalizer, target_logit, _ = indexing.normalizers_and_targets(logits, features["decoder_target_tokens"])
    weights = ops.cast(features["decoder_loss_weights"], logits.dtype)
    return ops.sum((target_logit - normalizer) * weights, axis=-1)
