"""Assignment of expert slots to tokens, for routing policies."""

from collections.abc import Callable

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.decisions import Options, Scores, TokenChoices
from switch_tf.ops import dtypes, indexing
from switch_tf.partitioning.tensors import Tensor


def top_experts(scores: Scores, count: int) -> Tensor:
    """Returns the `count` best experts of each token, best first: <int32>[group, tokens, choice].

    Ties go to the lowest index.
    """
    if count == 1:
        return ops.cast(ops.argmax(scores.selection, axis=-1), "int32")[..., None]
    return ops.top_k(scores.selection, count)[1]


def probabilities(scores: Scores, expert_index: Tensor) -> Tensor:
    """Looks up the probabilities of experts: <int32>[group, tokens, choice] -> <float32>, same shape."""
    num_experts = scores.probs.shape[-1]
    # A gather's gradient would be a scatter.
    chosen = ops.one_hot(expert_index, num_experts, dtype=scores.probs.dtype)
    return dtypes.widen(ops.sum(ops.expand_dims(scores.probs, 2) * chosen, axis=-1))


def assign(scores: Scores, options: Options, expert_index: Tensor, gates: Tensor | None = None,
           order: Tensor | None = None, is_wanted: Callable[[Tensor], Tensor] | None = None) -> TokenChoices:
    """Assigns slots first come first served, all first choices before all second choices.

    Args:
        expert_index: <int32>[group, tokens, choice]. The requested experts.
        gates: <float32>[group, tokens, choice]. Defaults to the probabilities, normalized over several choices if
            `options.is_normalized`.
        order: <int32>[group, tokens]. Token indices in order of service. Defaults to the order of the sequence.
        is_wanted: Maps the gates to <bool>[group, tokens, choice]: the choices that compete for slots.
    """
    if gates is None:
        gates = probabilities(scores, expert_index)
        if expert_index.shape[-1] > 1 and options.is_normalized:
            gates = gates / (ops.sum(gates, axis=-1, keepdims=True) + 1e-9)
    routed = ops.broadcast_to(scores.is_real[..., None], ops.shape(expert_index))
    if is_wanted is not None:
        routed = routed & is_wanted(gates)
    asked = expert_index
    if order is not None:
        order = order[..., None]
        asked, routed = (ops.take_along_axis(x, order, axis=1) for x in (asked, routed))
    num_groups, num_tokens, num_choices = ops.shape(asked)
    # [group, tokens, choice] -> [group, choice * tokens]
    in_line = ops.where(routed, asked, options.num_experts)
    in_line = ops.reshape(ops.transpose(in_line, (0, 2, 1)), (num_groups, num_choices * num_tokens))
    place, _ = positions(in_line, options.num_experts)
    place = ops.transpose(ops.reshape(place, (num_groups, num_choices, num_tokens)), (0, 2, 1))
    slot = ops.where(routed & (place < options.capacity), place, options.capacity)
    if order is not None:
        slot = ops.take_along_axis(slot, ops.argsort(order, axis=1), axis=1)
    return token_choices(options, expert_index, slot, gates)


def token_choices(options: Options, expert_index: Tensor, slot: Tensor, gates: Tensor) -> TokenChoices:
    """Returns TokenChoices of <int32>, <int32> and <float32>[group, tokens, choice]. Gates without a slot become 0."""
    gates = ops.where(slot < options.capacity, gates, 0.0)
    return TokenChoices(expert_index, slot, gates, options.num_experts, options.capacity)


def positions(in_line: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Counts, for each entry, its group's earlier entries with the same expert.

    Sorts: a cumulative sum over one-hots would cost more with more experts.

    Args:
        in_line: <int32>[group, entry]. An expert, or `num_experts` for none.

    Returns:
        `(place, length)`: <int32>[group, entry], and <int32>[group, expert], the number of entries of each expert.
    """
    count = ops.shape(in_line)[1]
    # argsort is stable, so entries of one expert stay in order.
    order = ops.argsort(in_line, axis=1)
    length = indexing.count_into_bins(in_line, num_experts + 1)
    start = ops.cumsum(length, axis=1) - length
    in_order = ops.take_along_axis(in_line, order, axis=1)
    place = partitioning.arange(count) - ops.take_along_axis(start, in_order, axis=1)
    return ops.take_along_axis(place, ops.argsort(order, axis=1), axis=1), length[:, :num_experts]
