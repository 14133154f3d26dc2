"""Log likelihoods of given targets."""

import keras
from keras import ops

from switch_tf import context
from switch_tf.ops import indexing
from switch_tf.partitioning.tensors import Tensor


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
