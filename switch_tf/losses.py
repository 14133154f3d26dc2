"""Every loss formula, in float32 at least: cross-entropy with z-loss, load balancing, router z-loss."""

from keras import ops

from switch_tf import partitioning
from switch_tf.metrics import Mean, RouterStats
from switch_tf.semantics import rules_of


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
    logits = partitioning.widen(logits)
    weights = ops.cast(loss_weights, logits.dtype)
    log_normalizer, target_logit, largest = partitioning.normalizers_and_targets(logits, ops.cast(targets, "int32"))
    is_right = ops.cast(ops.equal(target_logit, largest), logits.dtype)
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
        expert_index: <int32>[group, tokens], the first choice, or [group, tokens, choice], all of them.
        padding_mask: <bool>[group, tokens], True where the token is real, or None.
        semantics: str, see `semantics.Rules`. "mtf" repeats Mesh TensorFlow, which divides by all tokens: with one
            choice it lets padding into f and P and multiplies the mean of the mask in afterwards, with several it masks
            both. "t5x" counts every choice in f, so that the loss of k choices is k when even.

    Returns:
        <float32> scalar, the mean over groups weighted by their real tokens.
    """
    return load_balancing_mean(router_probs, expert_index, padding_mask, semantics).value


def load_balancing_mean(router_probs, expert_index, padding_mask=None, semantics="switch_tf") -> Mean:
    """`load_balancing_loss` as a Mean that merges over parts of a batch; its weight is the number of counted tokens."""
    rules = rules_of(semantics)
    num_experts = router_probs.shape[-1]
    probs = partitioning.widen(router_probs)
    expert_index = ops.convert_to_tensor(expert_index)
    has_choices = len(expert_index.shape) == 3
    num_choices = expert_index.shape[-1] if has_choices else 1
    if rules.balances_every_choice and has_choices:
        chosen = ops.sum(ops.one_hot(expert_index, num_experts, dtype=probs.dtype), axis=2)
    else:
        chosen = ops.one_hot(expert_index[..., 0] if has_choices else expert_index, num_experts, dtype=probs.dtype)
    real = ops.ones_like(probs[..., 0]) if padding_mask is None else ops.cast(padding_mask, probs.dtype)
    num_tokens = ops.sum(ops.ones_like(real), axis=1)
    if rules.balances_over_all_tokens and num_choices == 1:
        per_group = ops.sum(ops.mean(chosen, axis=1) * ops.mean(probs, axis=1), axis=-1) * ops.mean(real, axis=1)
        return Mean(num_experts * ops.sum(per_group * num_tokens), ops.sum(num_tokens))
    counted = ops.expand_dims(real, -1)
    divisor = num_tokens if rules.balances_over_all_tokens else ops.sum(real, axis=1)
    safe_divisor = ops.expand_dims(ops.maximum(divisor, 1.0), -1)
    fraction = ops.sum(chosen * counted, axis=1) / safe_divisor
    mean_prob = ops.sum(probs * counted, axis=1) / safe_divisor
    per_group = num_experts * ops.sum(fraction * mean_prob, axis=-1)
    return Mean(ops.sum(per_group * divisor), ops.sum(divisor))


def second_place_mean(router_probs, expert_index, padding_mask=None, semantics="switch_tf") -> Mean:
    """The load-balancing loss of the second choices, among the experts that are left (Mesh TensorFlow).

    Args:
        expert_index: <int32>[group, tokens, choice], of at least two choices.

    Returns:
        Mean, with probabilities renormalised after the first choice is taken out; 1.0 when even.
    """
    probs = partitioning.widen(router_probs)
    is_left = 1.0 - ops.one_hot(expert_index[..., 0], probs.shape[-1], dtype=probs.dtype)
    left = probs * is_left
    left = left / (ops.sum(left, axis=-1, keepdims=True) + 1e-9)
    return load_balancing_mean(left, expert_index[..., 1:2], padding_mask, semantics)


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
    squared = ops.square(ops.logsumexp(partitioning.widen(router_logits), axis=-1))
    real = ops.ones_like(squared) if padding_mask is None else ops.cast(padding_mask, squared.dtype)
    return Mean(ops.sum(squared * real), ops.sum(real))


def router_loss(stats: RouterStats, load_balancing_loss_weight: float, router_z_loss_weight: float):
    """What one sparse layer adds to the loss: both router losses times their coefficients, <float32> scalar."""
    return (load_balancing_loss_weight * stats.load_balancing_loss.value
            + router_z_loss_weight * stats.router_z_loss.value)
