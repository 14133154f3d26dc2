"""Who gets an expert's slots: queues of tokens, as policies put them together."""

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.decisions import Options, Scores, TokenChoices
from switch_tf.ops import dtypes, indexing


def first_choice(scores: Scores):
    """The preferred expert of each token, before capacity; ties go to the lowest: <int32>[group, tokens]."""
    return ops.cast(ops.argmax(scores.selection, axis=-1), "int32")


def top_experts(scores: Scores, count: int):
    """The `count` best experts of each token, the best one first: <int32>[group, tokens, choice]."""
    if count == 1:
        return first_choice(scores)[..., None]
    return ops.cast(ops.top_k(scores.selection, count)[1], "int32")


def probabilities(scores: Scores, expert_index):
    """Probabilities of experts: <int32>[group, tokens, choice] -> <float32>, same shape."""
    num_experts = scores.probs.shape[-1]
    # A product with a one-hot, whose gradient is a product too; a gather's would be a scatter.
    chosen = ops.one_hot(expert_index, num_experts, dtype=scores.probs.dtype)
    return dtypes.widen(ops.sum(ops.expand_dims(scores.probs, 2) * chosen, axis=-1))


def assign(scores: Scores, options: Options, expert_index, gates=None, order=None, is_wanted=None) -> TokenChoices:
    """Sends tokens to experts, first come first served, and all first choices before all second ones.

    Args:
        expert_index: <int32>[group, tokens, choice], where each token wants to go.
        gates: <float32>[group, tokens, choice], by default the probabilities, of several choices as
            `options.is_normalized` says.
        order: <int32>[group, tokens], the tokens in the order in which they come, by default as they stand.
        is_wanted: as in Options. Choices that are not wanted wait for no slot.
    """
    if gates is None:
        gates = probabilities(scores, expert_index)
        if expert_index.shape[-1] > 1 and options.is_normalized:
            gates = gates / (ops.sum(gates, axis=-1, keepdims=True) + 1e-9)
    if scores.is_real is None:
        routed = ops.ones_like(expert_index, dtype="bool")
    else:
        routed = ops.broadcast_to(scores.is_real[..., None], ops.shape(expert_index))
    if is_wanted is not None:
        routed = ops.logical_and(routed, is_wanted(gates))
    if order is None:
        slot = _slots(expert_index, routed, options)
    else:
        order = order[..., None]
        slot = _slots(ops.take_along_axis(expert_index, order, axis=1), ops.take_along_axis(routed, order, axis=1),
                      options)
        slot = ops.take_along_axis(slot, ops.argsort(order, axis=1), axis=1)
    return token_choices(options, expert_index, slot, gates)


def token_choices(options: Options, expert_index, slot, gates) -> TokenChoices:
    """TokenChoices of <int32>, <int32> and <float32>[group, tokens, choice], with gate 0 where there is no slot."""
    gates = ops.where(slot < options.capacity, gates, 0.0)
    return TokenChoices(expert_index, slot, gates, options.num_experts, options.capacity)


def _slots(expert_index, routed, options):
    """Slots in the order of tokens, `options.capacity` where there is none.

    Args:
        expert_index, routed: <int32>, <bool>[group, tokens, choice].

    Returns:
        <int32>[group, tokens, choice]
    """
    num_groups, num_tokens, num_choices = ops.shape(expert_index)
    # [group, tokens, choice] -> [group, choice * tokens]
    in_line = ops.where(routed, expert_index, options.num_experts)
    in_line = ops.reshape(ops.transpose(in_line, (0, 2, 1)), (num_groups, num_choices * num_tokens))
    place, _ = positions(in_line, options.num_experts)
    place = ops.transpose(ops.reshape(place, (num_groups, num_choices, num_tokens)), (0, 2, 1))
    return ops.where(ops.logical_and(routed, place < options.capacity), place, options.capacity)


def positions(in_line, num_experts):
    """Place of each one in its expert's queue: the number of earlier ones of its group that wait for the same expert.

    By sorting, whose cost does not grow with the number of experts as that of a cumulative sum over one-hots does.

    Args:
        in_line: <int32>[group, place in line], an expert, or `num_experts` for those that wait for none.

    Returns:
        `(place, length)`: <int32>, same shape as `in_line`, and <int32>[group, expert], the length of each queue.
    """
    count = ops.shape(in_line)[1]
    # Stable: of equal ones the first comes first.
    order = ops.argsort(in_line, axis=1)
    length = indexing.count_into_bins(in_line, num_experts + 1)
    start = ops.cumsum(length, axis=1) - length
    in_order = ops.take_along_axis(in_line, order, axis=1)
    place = partitioning.arange(count) - ops.take_along_axis(start, in_order, axis=1)
    return ops.take_along_axis(place, ops.argsort(order, axis=1), axis=1), length[:, :num_experts]
