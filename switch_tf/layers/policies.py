"""Routing policies: how scores become decisions. Each is a function of `Scores` and the experts' capacity.

A policy chooses by `scores.selection` and gates by `scores.probs`. Padding is never routed and takes no slot.
"""

from typing import Any, NamedTuple

from keras import ops

from switch_tf import partitioning

NTLB_ROUNDS = 4
SINKHORN_ITERATIONS = 20


class Scores(NamedTuple):
    """What a policy decides on.

    `selection`: <float32>[group, tokens, expert], finite; higher is preferred.
    `probs`: <router dtype>[group, tokens, expert], the router's softmax.
    `is_real`: <bool>[group, tokens], False at padding, or None.
    """

    selection: Any
    probs: Any
    is_real: Any


class Decisions(NamedTuple):
    """Tokens choose experts, for `dispatch` to carry out.

    `expert_index`: <int32>[group, tokens, choice], the chosen expert.
    `slot`: <int32>[group, tokens, choice], the token's place in its expert's buffer, in [0, capacity); `capacity` where
        the choice was dropped or the token is padding. No two choices of a group share an expert's slot.
    `gate`: <float32>[group, tokens, choice], what the expert's output is multiplied by; 0 where there is no slot.
    """

    expert_index: Any
    slot: Any
    gate: Any


class ExpertChoices(NamedTuple):
    """Experts choose tokens, any number of them the same one.

    `token_index`: <int32>[group, expert, capacity], the token in each slot; the number of tokens where it is empty.
    `gate`: <float32>[group, expert, capacity], what the slot's output is multiplied by; 0 where it is empty.
    """

    token_index: Any
    gate: Any


def switch(scores: Scores, capacity) -> Decisions:
    """Top-1, first come first served (Switch Transformer, section 2.1). Causal."""
    return _top(scores, 1, capacity)


def batch_prioritized(scores: Scores, num_choices: int, capacity, is_normalized=True) -> Decisions:
    """Top-k, the most confident tokens first (V-MoE, arXiv 2106.05974, section 4; Mesh TensorFlow's `switch_max`)."""
    confidence = ops.cast(ops.max(scores.probs, axis=-1), "float32")
    confidence = ops.where(ops.isnan(confidence), -1.0, confidence)
    # Of equally confident tokens the earlier one comes first: argsort is stable.
    return _top(scores, num_choices, capacity, order=ops.argsort(-confidence, axis=1), is_normalized=is_normalized)


def top_n(scores: Scores, num_choices: int, capacity, is_wanted, is_normalized=True) -> Decisions:
    """GShard's top-2 gating (arXiv 2006.16668, algorithm 1), for any number of choices.

    All first choices take their slots before any second one. The gates are divided by their sum, before any is dropped.

    Args:
        is_wanted: function of the <float32>[group, tokens, choice] gates that says which later choices are carried out:
            <bool>, same shape; see `second_choices`.
        is_normalized: bool. False keeps the probabilities as gates (T5X).
    """
    return _top(scores, num_choices, capacity, is_wanted=is_wanted, is_normalized=is_normalized)


def second_choices(policy: str, threshold: float, uniform):
    """Which choices after the first GShard's top-2 carries out.

    Args:
        policy: "all"; "none"; "threshold", those whose gate is above the threshold; "random", with probability
            gate / threshold, at most 1.
        uniform: function of a shape to <float32>[shape] uniform numbers in [0, 1) for "random", or None at inference,
            where "random" carries out all of them.
    """

    def is_wanted(gates):
        later = gates[..., 1:]
        if policy == "threshold":
            wanted = later > threshold
        elif policy == "random" and uniform is not None:
            wanted = uniform(ops.shape(later)) * threshold < later
        else:
            wanted = ops.full_like(later, policy != "none", dtype="bool")
        return ops.concatenate([ops.ones_like(gates[..., :1], dtype="bool"), wanted], axis=-1)

    return is_wanted


def ntlb(scores: Scores, capacity, rounds=NTLB_ROUNDS) -> Decisions:
    """No-Token-Left-Behind (Switch Transformer, appendix B): a token whose expert is full tries the next best one.

    Round by round, in order of tokens, up to the `rounds`-th best expert; the gate is the probability of the expert
    that took the token.
    """
    num_experts = scores.selection.shape[-1]
    rounds = min(rounds, num_experts)
    _, ranked = ops.top_k(scores.selection, rounds)
    waiting = _real(scores)
    num_groups, num_tokens = ops.shape(waiting)
    taken = ops.zeros((num_groups, num_experts), "int32")
    expert_index = ops.zeros((num_groups, num_tokens), "int32")
    slot = expert_index + capacity
    for choice in range(rounds):
        expert = ops.cast(ranked[..., choice], "int32")
        place, length = _places(ops.where(waiting, expert, num_experts), num_experts)
        place = place + ops.take_along_axis(taken, expert, axis=1)
        is_kept = ops.logical_and(waiting, place < capacity)
        expert_index, slot = ops.where(waiting, expert, expert_index), ops.where(is_kept, place, slot)
        taken = taken + length
        waiting = ops.logical_and(waiting, ops.logical_not(is_kept))
    expert_index = expert_index[..., None]
    return _decisions(expert_index, slot[..., None], _gates(scores, expert_index), capacity)


def hashed(token_ids, num_experts: int, is_real, capacity) -> Decisions:
    """Each token of the vocabulary has its expert, token id mod experts, with gate 1 (Lingvo; arXiv 2106.04426).

    SentencePiece numbers tokens by frequency, so that neighbours, which are about equally frequent, are spread evenly.
    Causal.
    """
    expert_index = ops.cast(token_ids, "int32")[..., None] % num_experts
    routed = ops.ones_like(expert_index, dtype="bool") if is_real is None else is_real[..., None]
    slot = _queue(expert_index, routed, num_experts, capacity)
    return _decisions(expert_index, slot, ops.ones_like(slot, dtype="float32"), capacity)


def sinkhorn(scores: Scores, capacity, training: bool) -> Decisions:
    """Top-1 of a balanced assignment: in training the tokens' preferences are scaled until experts get equal shares.

    Sinkhorn's iterations on exp(logits), without a gradient (V-MoE's `sparsity_constrained_ot`, Lingvo's
    `optimal_transport`); the gate stays the router's probability. At inference the best expert is taken, as in BASE
    (arXiv 2103.16716), so that a prediction does not depend on its batch.
    """
    if training:
        scores = scores._replace(selection=balanced(scores.selection, scores.is_real))
    return _top(scores, 1, capacity)


def balanced(logits, is_real=None):
    """Logits plus the price of each expert that makes exp(.), normalised by token, give all experts the same sum.

    Args:
        logits: <float32>[group, tokens, expert], finite.
        is_real: <bool>[group, tokens] or None.

    Returns:
        <float32>[group, tokens, expert] without a gradient.
    """
    logits = ops.stop_gradient(logits)
    absent = 0.0 if is_real is None else ops.where(is_real[..., None], 0.0, -1e9)
    price = ops.zeros_like(logits[:, :1, :])
    for _ in range(SINKHORN_ITERATIONS):
        per_token = ops.log_softmax(logits + price, axis=-1) + absent
        price = price - ops.logsumexp(per_token, axis=1, keepdims=True)
        price = price - ops.max(price, axis=-1, keepdims=True)
    return logits + price


def expert_choice(scores: Scores, capacity) -> ExpertChoices:
    """Each expert takes the tokens that give it the highest probability (arXiv 2202.09368). Never unbalanced.

    A token's output is the sum over the experts that took it, gated by its probability of each, not renormalised.
    """
    # [group, tokens, expert] -> [group, expert, tokens]
    wanted = ops.softmax(ops.transpose(scores.selection, (0, 2, 1)), axis=1)
    if scores.is_real is not None:
        wanted = ops.where(scores.is_real[:, None, :], wanted, -1.0)
    num_tokens = ops.shape(wanted)[-1]
    is_known = isinstance(capacity, int) and isinstance(num_tokens, int)
    preference, token_index = ops.top_k(wanted, (min if is_known else ops.minimum)(capacity, num_tokens))
    is_filled = preference >= 0
    token_index = ops.where(is_filled, ops.cast(token_index, "int32"), num_tokens)
    probs = ops.cast(ops.transpose(scores.probs, (0, 2, 1)), "float32")
    gate = ops.take_along_axis(probs, ops.where(is_filled, token_index, 0), axis=-1)
    return ExpertChoices(token_index, ops.where(is_filled, gate, 0.0))


def first_choice(scores: Scores):
    """The preferred expert of each token, before capacity; ties go to the lowest: <int32>[group, tokens]."""
    return ops.cast(ops.argmax(scores.selection, axis=-1), "int32")


def _top(scores, num_choices, capacity, order=None, is_wanted=None, is_normalized=True) -> Decisions:
    """The `num_choices` best experts of each token, in the queue in `order` of tokens."""
    if num_choices == 1:
        expert_index = first_choice(scores)[..., None]
    else:
        expert_index = ops.cast(ops.top_k(scores.selection, num_choices)[1], "int32")
    gates = _gates(scores, expert_index)
    if num_choices > 1 and is_normalized:
        gates = gates / (ops.sum(gates, axis=-1, keepdims=True) + 1e-9)
    routed = ops.broadcast_to(_real(scores)[..., None], ops.shape(expert_index))
    if is_wanted is not None:
        routed = ops.logical_and(routed, is_wanted(gates))
    num_experts = scores.selection.shape[-1]
    if order is None:
        slot = _queue(expert_index, routed, num_experts, capacity)
    else:
        order = order[..., None]
        slot = _queue(ops.take_along_axis(expert_index, order, axis=1), ops.take_along_axis(routed, order, axis=1),
                      num_experts, capacity)
        slot = ops.take_along_axis(slot, ops.argsort(order, axis=1), axis=1)
    return _decisions(expert_index, slot, gates, capacity)


def _queue(expert_index, routed, num_experts, capacity):
    """Slots, first come first served and all first choices before all second ones; `capacity` where there is none.

    Args:
        expert_index, routed: <int32>, <bool>[group, tokens, choice].

    Returns:
        <int32>[group, tokens, choice]
    """
    num_groups, num_tokens, num_choices = ops.shape(expert_index)
    # [group, tokens, choice] -> [group, choice * tokens]
    in_line = ops.where(routed, expert_index, num_experts)
    in_line = ops.reshape(ops.transpose(in_line, (0, 2, 1)), (num_groups, num_choices * num_tokens))
    place, _ = _places(in_line, num_experts)
    place = ops.transpose(ops.reshape(place, (num_groups, num_choices, num_tokens)), (0, 2, 1))
    return ops.where(ops.logical_and(routed, place < capacity), place, capacity)


def _places(in_line, num_experts):
    """Place of each one in its expert's queue: the number of earlier ones of its group that wait for the same expert.

    By sorting, whose cost does not grow with the number of experts as that of a cumulative sum over one-hots does.

    Args:
        in_line: <int32>[group, place in line], an expert, or `num_experts` for those that wait for none.

    Returns:
        `(place, length)`: <int32>, same shape as `in_line`, and <int32>[group, expert], the length of each queue.
    """
    num_groups, count = ops.shape(in_line)
    # Stable: of equal ones the first comes first.
    order = ops.argsort(in_line, axis=1)
    group = partitioning.arange(num_groups)[:, None]
    if partitioning.is_partitioned():
        # A sum over segments of all groups would bring them together.
        length = ops.sum(ops.one_hot(in_line, num_experts + 1, dtype="int32"), axis=1)
    else:
        queue = ops.reshape(in_line + group * (num_experts + 1), (-1,))
        length = ops.segment_sum(ops.ones_like(queue), queue, num_segments=num_groups * (num_experts + 1))
        length = ops.reshape(length, (num_groups, num_experts + 1))
    start = ops.cumsum(length, axis=1) - length
    in_order = ops.take_along_axis(in_line, order, axis=1)
    place = partitioning.arange(count) - ops.take_along_axis(start, in_order, axis=1)
    return ops.take_along_axis(place, ops.argsort(order, axis=1), axis=1), length[:, :num_experts]


def _decisions(expert_index, slot, gates, capacity):
    return Decisions(expert_index, slot, ops.where(slot < capacity, gates, 0.0))


def _gates(scores, expert_index):
    """Probabilities of the chosen experts: <float32>[group, tokens, choice]."""
    num_experts = scores.selection.shape[-1]
    # A product with a one-hot, whose gradient is a product too; a gather's would be a scatter.
    chosen = ops.one_hot(expert_index, num_experts, dtype=scores.probs.dtype)
    return ops.cast(ops.sum(ops.expand_dims(scores.probs, 2) * chosen, axis=-1), "float32")


def _real(scores):
    if scores.is_real is None:
        return ops.ones_like(scores.selection[..., 0], dtype="bool")
    return scores.is_real
