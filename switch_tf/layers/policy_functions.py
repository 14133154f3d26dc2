"""The shipped routing policies. They choose by `scores.selection` and gate by `scores.probs`."""

from typing import Any

from keras import ops

from switch_tf.layers import slots
from switch_tf.layers.decisions import ExpertChoices, Options, Scores, TokenChoices
from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Tensor

NTLB_ROUNDS = 4
SINKHORN_ITERATIONS = 20


def switch(scores: Scores, options: Options) -> TokenChoices:
    """Routes each token to its best expert, first come first served (Switch Transformer, section 2.1)."""
    return slots.assign(scores, options, slots.top_experts(scores, 1))


def batch_prioritized(scores: Scores, options: Options) -> TokenChoices:
    """Routes to the top k experts, most confident tokens first, as Mesh TensorFlow's `switch_max`.

    V-MoE (arXiv 2106.05974, section 4).
    """
    confidence = dtypes.widen(ops.max(scores.probs, axis=-1))
    confidence = ops.where(ops.isnan(confidence), -1.0, confidence)
    # argsort is stable: ties go to the earlier token.
    order = ops.argsort(-confidence, axis=1)
    return slots.assign(scores, options, slots.top_experts(scores, options.num_choices), order=order)


def top_n(scores: Scores, options: Options) -> TokenChoices:
    """Routes by GShard's top-2 gating (arXiv 2006.16668, algorithm 1), for any number of choices.

    Gates are normalized before tokens are dropped.
    """
    expert_index = slots.top_experts(scores, options.num_choices)
    return slots.assign(scores, options, expert_index, is_wanted=lambda gates: second_choices(gates, options))


def second_choices(gates: Tensor, options: Options) -> Tensor:
    """Selects the choices of GShard's top-2 that compete for slots, always the first: <bool>, shape of `gates`."""
    policy: Any = options.policy  # a Top2 or TopN
    rule, threshold, later = policy.second_expert, policy.threshold, gates[..., 1:]
    if rule == "threshold":
        wanted = later > threshold
    elif rule == "random" and options.uniform is not None:
        wanted = ops.cast(options.uniform(ops.shape(later)), later.dtype) * threshold < later
    else:
        wanted = ops.full_like(later, rule != "none", dtype="bool")
    return ops.concatenate([ops.ones_like(gates[..., :1], dtype="bool"), wanted], axis=-1)


def ntlb(scores: Scores, options: Options, rounds: int = NTLB_ROUNDS) -> TokenChoices:
    """Reroutes tokens of full experts to their next best expert (No-Token-Left-Behind, appendix B).

    Each round serves the waiting tokens in order, up to their `rounds`-th best expert. The gate is the final expert's
    probability.
    """
    num_experts, capacity = options.num_experts, options.capacity
    rounds = min(rounds, num_experts)
    _, ranked = ops.top_k(scores.selection, rounds)
    waiting = scores.is_real
    num_groups, num_tokens = ops.shape(waiting)
    taken = ops.zeros((num_groups, num_experts), "int32")
    expert_index = ops.zeros((num_groups, num_tokens), "int32")
    slot = expert_index + capacity
    for choice in range(rounds):
        expert = ranked[..., choice]
        place, length = slots.positions(ops.where(waiting, expert, num_experts), num_experts)
        place = place + ops.take_along_axis(taken, expert, axis=1)
        is_kept = waiting & (place < capacity)
        expert_index, slot = ops.where(waiting, expert, expert_index), ops.where(is_kept, place, slot)
        taken = taken + length
        waiting = waiting & ~is_kept
    expert_index = expert_index[..., None]
    return slots.token_choices(options, expert_index, slot[..., None], slots.probabilities(scores, expert_index))


def hashed(scores: Scores, options: Options) -> TokenChoices:
    """Routes by token id modulo the number of experts, with gate 1 (Lingvo; arXiv 2106.04426).

    SentencePiece orders ids by frequency, so every expert gets frequent and rare tokens.
    """
    expert_index = ops.cast(scores.token_ids, "int32")[..., None] % options.num_experts
    return slots.assign(scores, options, expert_index, gates=ops.ones_like(expert_index, dtype="float32"))


def sinkhorn(scores: Scores, options: Options) -> TokenChoices:
    """Routes to the best expert; in training, to the best expert of a balanced assignment.

    Sinkhorn's iterations on exp(logits), without a gradient, as V-MoE's `sparsity_constrained_ot` and Lingvo's
    `optimal_transport`. The gate stays the router's probability. Inference does not balance, as in BASE
    (arXiv 2103.16716), so predictions do not depend on their batch.
    """
    if options.training:
        scores = scores._replace(selection=balanced(scores.selection, scores.is_real))
    return switch(scores, options)


def balanced(logits: Tensor, is_real: Tensor) -> Tensor:
    """Adds a price per expert to the logits, so that softmaxes give all experts equal totals.

    Args:
        logits: <float32>[group, tokens, expert], finite.

    Returns: Same shape, without a gradient.
    """
    logits = ops.stop_gradient(logits)
    absent = -1e9 * ops.cast(~is_real[..., None], logits.dtype)
    price = ops.zeros_like(logits[:, :1, :])
    for _ in range(SINKHORN_ITERATIONS):
        per_token = ops.log_softmax(logits + price, axis=-1) + absent
        price = price - ops.logsumexp(per_token, axis=1, keepdims=True)
        price = price - ops.max(price, axis=-1, keepdims=True)
    return logits + price


def expert_choice(scores: Scores, options: Options) -> ExpertChoices:
    """Lets each expert take the tokens that give it the highest probability (arXiv 2202.09368).

    A token's output sums the experts that took it, gated by its unnormalized probabilities.
    """
    # [group, tokens, expert] -> [group, expert, tokens]
    wanted = ops.softmax(ops.transpose(scores.selection, (0, 2, 1)), axis=1)
    wanted = ops.where(scores.is_real[:, None, :], wanted, -1.0)
    capacity, num_tokens = options.capacity, ops.shape(wanted)[-1]
    is_known = isinstance(capacity, int) and isinstance(num_tokens, int)
    preference, token_index = ops.top_k(wanted, (min if is_known else ops.minimum)(capacity, num_tokens))
    is_filled = preference >= 0
    token_index = ops.where(is_filled, token_index, num_tokens)
    probs = dtypes.widen(ops.transpose(scores.probs, (0, 2, 1)))
    gate = ops.take_along_axis(probs, ops.where(is_filled, token_index, 0), axis=-1)
    return ExpertChoices(token_index, ops.where(is_filled, gate, 0.0), num_tokens, options.num_experts, capacity)
