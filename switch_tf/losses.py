"""Every loss formula, in float32: cross-entropy with z-loss, load balancing, router z-loss."""

from keras import ops

from switch_tf.config import SEMANTICS, check_choice
from switch_tf.metrics import Mean, RouterStats


def cross_entropy(logits, targets, loss_weights, z_loss_weight=1e-4, label_smoothing=0.0) -> tuple[Mean, Mean, Mean]:
    """Cross-entropy of next tokens, its z-loss (Mesh TensorFlow, T5X), and accuracy.

    Args:
        logits: <float32>[batch, length, vocab].
        targets: <int32>[batch, length].
        loss_weights: [batch, length], 1 for real targets and 0 for padding.
        z_loss_weight: float. Adds weight * logsumexp(logits)^2, which keeps the logits' normaliser near 0.
        label_smoothing: float in [0, 1). Share of each target's probability spread over the whole vocabulary. The
            entropy of the smoothed target is not subtracted (as in Mesh TensorFlow, unlike T5X).

    Returns:
        Means over real targets, in nats per token: cross-entropy, weighted z-loss; and the share of targets
        that have the largest logit.
    """
    logits = ops.cast(logits, "float32")
    weights = ops.cast(loss_weights, "float32")
    log_normalizer = ops.logsumexp(logits, axis=-1)
    vocab_size = logits.shape[-1]
    # A product with a one-hot, not a gather: it stays local when the vocabulary is split over devices.
    is_target = ops.one_hot(targets, vocab_size, dtype="float32")
    target_logit = ops.sum(logits * is_target, axis=-1)
    is_right = ops.cast(ops.equal(target_logit, ops.max(logits, axis=-1)), "float32")
    if label_smoothing:
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * ops.mean(logits, axis=-1)
    num_targets = ops.sum(weights)
    loss = ops.sum((log_normalizer - target_logit) * weights)
    z_loss = z_loss_weight * ops.sum(ops.square(log_normalizer) * weights)
    return Mean(loss, num_targets), Mean(z_loss, num_targets), Mean(ops.sum(is_right * weights), num_targets)


def load_balancing_loss(router_probs, expert_index, padding_mask=None, semantics="switch_tf"):
    """The paper's equation 4 (section 2.2) without its coefficient: num_experts * sum_e f_e P_e.

    f_e is the share of real tokens whose first choice is expert e, before capacity and without a gradient; P_e is the
    mean probability of expert e over real tokens. The loss is 1.0 when both are even, however much padding there is.

    Args:
        router_probs: <float32>[group, tokens, expert].
        expert_index: <int32>[group, tokens], the first choice.
        padding_mask: <bool>[group, tokens], True where the token is real, or None.
        semantics: "mtf" repeats Mesh TensorFlow, which lets padding into f and P and multiplies the mean of the mask
            in afterwards.

    Returns:
        <float32> scalar, the mean over groups weighted by their real tokens.
    """
    return load_balancing_mean(router_probs, expert_index, padding_mask, semantics).value


def load_balancing_mean(router_probs, expert_index, padding_mask=None, semantics="switch_tf") -> Mean:
    """`load_balancing_loss` as a Mean that merges over parts of a batch; its weight is the number of real tokens."""
    check_choice("semantics", semantics, SEMANTICS)
    num_experts = router_probs.shape[-1]
    probs = ops.cast(router_probs, "float32")
    first_choice = ops.one_hot(expert_index, num_experts, dtype="float32")
    real = ops.ones_like(probs[..., 0]) if padding_mask is None else ops.cast(padding_mask, "float32")
    if semantics == "mtf":
        # [group, tokens, expert] -> [group]
        per_group = num_experts * ops.sum(ops.mean(first_choice, axis=1) * ops.mean(probs, axis=1), axis=-1)
        return Mean(ops.sum(per_group * ops.mean(real, axis=1)), ops.sum(ops.ones_like(per_group)))
    num_real = ops.sum(real, axis=1)
    counted = ops.expand_dims(real, -1)
    divisor = ops.expand_dims(ops.maximum(num_real, 1.0), -1)
    fraction = ops.sum(first_choice * counted, axis=1) / divisor
    mean_prob = ops.sum(probs * counted, axis=1) / divisor
    per_group = num_experts * ops.sum(fraction * mean_prob, axis=-1)
    return Mean(ops.sum(per_group * num_real), ops.sum(num_real))


def router_z_loss(router_logits, padding_mask=None):
    """ST-MoE's z-loss without its coefficient: the mean over real tokens of logsumexp(logits)^2.

    Args:
        router_logits: <float32>[group, tokens, expert].
        padding_mask: <bool>[group, tokens], True where the token is real, or None.

    Returns:
        <float32> scalar.
    """
    return router_z_mean(router_logits, padding_mask).value


def router_z_mean(router_logits, padding_mask=None) -> Mean:
    """`router_z_loss` as a Mean that merges over parts of a batch."""
    squared = ops.square(ops.logsumexp(ops.cast(router_logits, "float32"), axis=-1))
    real = ops.ones_like(squared) if padding_mask is None else ops.cast(padding_mask, "float32")
    return Mean(ops.sum(squared * real), ops.sum(real))


def router_loss(stats: RouterStats, load_balancing_loss_weight: float, router_z_loss_weight: float):
    """What one sparse layer adds to the loss: both router losses times their coefficients, <float32> scalar."""
    return (load_balancing_loss_weight * stats.load_balancing_loss.value
            + router_z_loss_weight * stats.router_z_loss.value)
