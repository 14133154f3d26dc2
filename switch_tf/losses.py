"""All loss formulas, in float32 or wider."""

from typing import Any, NamedTuple

from keras import ops

from switch_tf import checks
from switch_tf.configs.semantics import rules_of
from switch_tf.metrics import Mean, RouterStats
from switch_tf.ops import dtypes, forms, indexing
from switch_tf.partitioning.tensors import Mask, Tensor
from switch_tf.refusals import Refusal


def cross_entropy(logits: Tensor, targets: Tensor, loss_weights: Tensor, z_loss_weight: float = 1e-4,
                  label_smoothing: float = 0.0) -> tuple[Mean, Mean, Mean]:
    """Computes the cross-entropy of next tokens, its z-loss (Mesh TensorFlow, T5X) and the accuracy.

    Args:
        logits: <float32>[batch, length, vocab].
        targets: <int32>[batch, length].
        loss_weights: <number>[batch, length], 1 at real targets, 0 at padding.
        z_loss_weight: 0 or above. The z-loss, weight * logsumexp(logits)^2, keeps the logits' normaliser near 0.
        label_smoothing: In [0, 1). Share of each target's probability spread over the vocabulary. The entropy of the
            smoothed target is not subtracted (Mesh TensorFlow, unlike T5X).

    Returns:
        Means over real targets: cross-entropy and weighted z-loss in nats per token, and the share of targets with the
        largest logit. Ties go to the first.
    """
    z_loss_weight = checks.number("z_loss_weight", z_loss_weight, "0 or above")
    label_smoothing = checks.number("label_smoothing", label_smoothing, "in [0, 1)")
    logits = _checked("logits", logits, "float", (None, None, None))
    targets = _checked("targets", targets, "int", logits.shape[:2])
    loss_weights = _checked("loss_weights", loss_weights, "number", logits.shape[:2])
    checks.indices("targets", forms.known_values(targets), logits.shape[-1])
    logits = dtypes.widen(logits)
    weights = ops.cast(loss_weights, logits.dtype)
    targets = ops.cast(targets, "int32")
    log_normalizer, target_logit, predicted = indexing.normalizers_and_targets(logits, targets)
    is_right = ops.cast(ops.equal(targets, predicted), logits.dtype)
    if label_smoothing:
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * ops.mean(logits, axis=-1)
    num_targets = ops.sum(weights)
    loss = ops.sum((log_normalizer - target_logit) * weights)
    z_loss = z_loss_weight * ops.sum(ops.square(log_normalizer) * weights)
    return Mean(loss, num_targets), Mean(z_loss, num_targets), Mean(ops.sum(is_right * weights), num_targets)


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, loss_weights: Tensor, temperature: float = 1.0) -> Mean:
    """Computes T^2 times the cross-entropy between a teacher's and a student's probabilities, both at temperature T.

    T^2 keeps the gradient's size (Hinton et al., 2015, section 2; Mesh TensorFlow's StudentTeacher). The minimum is T^2
    times the entropy of the teacher's probabilities.

    Args:
        logits, teacher_logits: <float32>[batch, length, vocab].
        loss_weights: See `cross_entropy`.
        temperature: T, above 0.

    Returns:
        Mean over real targets, in nats per token.
    """
    logits = _divide_logits("logits", logits, temperature)
    teacher_logits = _checked("teacher_logits", teacher_logits, "float", logits.shape)
    probs = ops.softmax(ops.cast(teacher_logits, logits.dtype) / temperature, axis=-1)
    per_target = ops.logsumexp(logits, axis=-1) - ops.sum(probs * logits, axis=-1)
    return _soft_mean(per_target, loss_weights, temperature)


class Predictions(NamedTuple):
    """A teacher's probabilities of the k most probable next tokens, and of the rest together.

    Attributes:
        token_ids: <int32>[batch, length, k], distinct at each place.
        log_probs: <float>[batch, length, k].
        log_rest: <float>[batch, length], log probability of the rest. About -1e9 if k is the vocabulary's size.
    """

    token_ids: Any
    log_probs: Any
    log_rest: Any


def most_probable(teacher_logits: Tensor, num_tokens: int, temperature: float = 1.0) -> Predictions:
    """Returns the Predictions softmax(teacher_logits / T), the most probable token first.

    Args:
        teacher_logits: <float32>[batch, length, vocab].
        num_tokens: k, at most the vocabulary's size.
        temperature: T, above 0.
    """
    logits = _divide_logits("teacher_logits", teacher_logits, temperature)
    num_tokens = checks.integer("num_tokens", num_tokens, 1)
    if num_tokens > logits.shape[-1]:
        raise Refusal(f"num_tokens must be at most {logits.shape[-1]}, the size of the vocabulary, not {num_tokens}.")
    token_ids = ops.cast(ops.top_k(logits, num_tokens)[1], "int32")
    return Predictions(token_ids, *_split_log_probs(logits, token_ids))


def coarse_soft_cross_entropy(logits: Tensor, predictions: Predictions, loss_weights: Tensor,
                              temperature: float = 1.0) -> Mean:
    """Computes `soft_cross_entropy` to a teacher's Predictions, with all remaining tokens as one outcome.

    Smaller than `soft_cross_entropy` by the teacher's probability of the remaining tokens times their cross-entropy.

    Args:
        predictions: At temperature T.
        logits, loss_weights, temperature: See `soft_cross_entropy`.
    """
    logits = _divide_logits("logits", logits, temperature)
    if not isinstance(predictions, Predictions):
        raise Refusal(f"predictions must be losses.Predictions, not {checks.shown(predictions)}.")
    token_ids = _checked("token_ids", predictions.token_ids, "int", (*logits.shape[:2], None))
    teacher = [_checked("log_probs", predictions.log_probs, "float", token_ids.shape),
               _checked("log_rest", predictions.log_rest, "float", logits.shape[:2])]
    probs, rest = (ops.exp(ops.cast(log, logits.dtype)) for log in teacher)
    log_probs, log_rest = _split_log_probs(logits, ops.cast(token_ids, "int32"))
    return _soft_mean(-ops.sum(probs * log_probs, axis=-1) - rest * log_rest, loss_weights, temperature)


def _soft_mean(per_target, loss_weights, temperature):
    loss_weights = _checked("loss_weights", loss_weights, "number", per_target.shape)
    weights = ops.cast(loss_weights, per_target.dtype)
    return Mean(temperature ** 2 * ops.sum(per_target * weights), ops.sum(weights))


def _divide_logits(name, logits, temperature):
    temperature = checks.number("temperature", temperature, "above 0")
    return dtypes.widen(_checked(name, logits, "float", (None, None, None))) / temperature


def _split_log_probs(logits, token_ids):
    """Returns log probabilities of some tokens, and of the rest together."""
    chosen, rest = indexing.split_off(logits, token_ids)
    # 1 - sum(probs) would lose all digits of a small rest, and its gradient.
    log_rest = ops.logsumexp(rest, axis=-1)
    log_normalizer = ops.logaddexp(ops.logsumexp(chosen, axis=-1), log_rest)
    return chosen - ops.expand_dims(log_normalizer, -1), log_rest - log_normalizer


class Balance(NamedTuple):
    """Factors of each group's load-balancing loss, the sum over experts of fraction * mean_prob.

    Attributes:
        fraction: <float32>[group, expert], f_e times the number of experts, without a gradient.
        mean_prob: <float32>[group, expert], P_e.
        num_counted: <float32>[group], tokens, the weight of the group's loss.
    """

    fraction: Any
    mean_prob: Any
    num_counted: Any

    @property
    def mean(self) -> Mean:
        """Mean loss over groups, weighted by their tokens."""
        per_group = ops.sum(self.fraction * self.mean_prob, axis=-1)
        return Mean(ops.sum(per_group * self.num_counted), ops.sum(self.num_counted))


def load_balancing_loss(router_probs: Tensor, expert_index: Tensor, padding_mask: Mask = None,
                        semantics: str = "switch_tf") -> Tensor:
    """Computes equation 4 of the paper (section 2.2) without its coefficient: num_experts * sum_e f_e P_e.

    f_e is the share of real tokens that choose expert e first, before capacity and without a gradient. P_e is the mean
    probability of expert e over real tokens. The loss is 1.0 when both are even.

    Args:
        router_probs: <float32>[group, tokens, expert].
        expert_index: <int32>[group, tokens] with the first choice, or [group, tokens, choice] with all choices.
        padding_mask: <bool>[group, tokens], True at real tokens.
        semantics: See `semantics.Rules`. "mtf" divides by all tokens: with one choice it includes padding in f and P
            and multiplies f by the mean of the mask; with several it masks both. "t5x" counts every choice in f, so the
            even loss of k choices is k. "t5x" and "hf" ignore the mask.

    Returns:
        <float32> scalar, the mean over groups weighted by their real tokens.
    """
    is_counted = None if rules_of(semantics).routes_padding else padding_mask
    return balance(router_probs, expert_index, is_counted, semantics).mean.value


def balance(router_probs: Tensor, expert_index: Tensor, padding_mask: Mask = None,
            semantics: str = "switch_tf", second_place_weight: float = 0.0) -> Balance:
    """Computes the factors of `load_balancing_loss`. The mask applies under any semantics.

    Args:
        router_probs, expert_index, padding_mask, semantics: See `load_balancing_loss`.
        second_place_weight: 0 or above. Weight of the second choices' loss (Mesh TensorFlow), 1.0 when even. 0 leaves
            it out. Probabilities of second choices are renormalised without the first choice, and their factors
            follow the first choices' factors: [group, 2 * expert].
    """
    rules = rules_of(semantics)
    second_place_weight = checks.number("second_place_weight", second_place_weight, "0 or above")
    router_probs = _checked("router_probs", router_probs, "float", (None, None, None))
    if isinstance(expert_index, list | tuple):
        expert_index = ops.convert_to_tensor(expert_index)
    has_choices = len(getattr(expert_index, "shape", ())) == 3
    expert_index = _checked("expert_index", expert_index, "int", (*router_probs.shape[:2], *[None] * has_choices))
    if not has_choices:
        expert_index = expert_index[..., None]
    if second_place_weight and expert_index.shape[-1] < 2:
        raise Refusal(f"expert_index must hold at least two choices of each token, not "
                      f"{expert_index.shape[-1]}.")
    num_experts = router_probs.shape[-1]
    probs = dtypes.widen(router_probs)
    if rules.balances_every_choice:
        chosen = ops.sum(ops.one_hot(expert_index, num_experts, dtype=probs.dtype), axis=2)
    else:
        chosen = ops.one_hot(expert_index[..., 0], num_experts, dtype=probs.dtype)
    real = _real(padding_mask, probs[..., 0])
    num_tokens = ops.sum(ops.ones_like(real), axis=1)
    if rules.balances_over_all_tokens and expert_index.shape[-1] == 1:
        fraction = ops.mean(chosen, axis=1) * ops.mean(real, axis=1, keepdims=True)
        return Balance(num_experts * fraction, ops.mean(probs, axis=1), num_tokens)
    counted = ops.expand_dims(real, -1)
    divisor = num_tokens if rules.balances_over_all_tokens else ops.sum(real, axis=1)
    safe_divisor = ops.expand_dims(ops.maximum(divisor, 1.0), -1)
    fraction = ops.sum(chosen * counted, axis=1) / safe_divisor
    mean_prob = ops.sum(probs * counted, axis=1) / safe_divisor
    first = Balance(num_experts * fraction, mean_prob, divisor)
    if not second_place_weight:
        return first
    is_left = 1.0 - ops.one_hot(expert_index[..., 0], num_experts, dtype=probs.dtype)
    left = probs * is_left
    left = left / (ops.sum(left, axis=-1, keepdims=True) + 1e-9)
    second = balance(left, expert_index[..., 1:2], padding_mask, semantics)
    return Balance(ops.concatenate([first.fraction, second_place_weight * second.fraction], axis=-1),
                   ops.concatenate([first.mean_prob, second.mean_prob], axis=-1), divisor)


def router_z_loss(router_logits: Tensor, padding_mask: Mask = None) -> Tensor:
    """Computes ST-MoE's z-loss without its coefficient, the mean of logsumexp(logits)^2 over real tokens.

    Args:
        router_logits: <float32>[group, tokens, expert].
        padding_mask: <bool>[group, tokens], True at real tokens.

    Returns:
        <float32> scalar.
    """
    return router_z_mean(router_logits, padding_mask).value


def router_z_mean(router_logits: Tensor, padding_mask: Mask = None) -> Mean:
    """Computes `router_z_loss` as a Mean."""
    router_logits = _checked("router_logits", router_logits, "float", (None, None, None))
    squared = ops.square(ops.logsumexp(dtypes.widen(router_logits), axis=-1))
    real = _real(padding_mask, squared)
    return Mean(ops.sum(squared * real), ops.sum(real))


def _real(padding_mask, like):
    if padding_mask is None:
        return ops.ones_like(like)
    return ops.cast(_checked("padding_mask", padding_mask, "bool", like.shape), like.dtype)


def _checked(name, value, kind, shape):
    value = ops.convert_to_tensor(value) if isinstance(value, list | tuple) else value
    checks.tensor(name, value, kind, shape)
    return ops.convert_to_tensor(value)


def router_loss(stats: RouterStats, load_balancing_loss_weight: float, router_z_loss_weight: float) -> Tensor:
    """Returns both weighted router losses of one sparse layer, <float32> scalar."""
    balance_weight = checks.number("load_balancing_loss_weight", load_balancing_loss_weight, "0 or above")
    z_weight = checks.number("router_z_loss_weight", router_z_loss_weight, "0 or above")
    return (balance_weight * stats.load_balancing_loss.value
            + z_weight * stats.router_z_loss.value)
