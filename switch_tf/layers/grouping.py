"""Group sizes and expert capacity for the tokens of a batch.

Groups depend on the global batch, never on the layout (see `partitioning.parts`).
"""

import fractions
import math
from typing import Any, NamedTuple

from keras import ops

from switch_tf import context, partitioning
from switch_tf.configs.semantics import rules_of
from switch_tf.refusals import Refusal


class Groups(NamedTuple):
    """`count` groups of `size` tokens. int32 scalar tensors if the number of tokens is unknown, otherwise ints."""

    count: Any
    size: Any


class Plan(NamedTuple):
    """Groups of a batch, and `capacity`, the slots of each expert per group: int or int32 scalar tensor."""

    groups: Groups
    capacity: Any


def plan(model, shape, training: bool, experts_choose=False) -> Plan:
    """Returns the groups and the capacity for this part of a batch.

    Without drops (`context.Context.no_drop`) each sequence is a group, which any layout can hold. Semantics whose
    groups are sequences keep their fixed capacity, so a Hugging Face encoder still drops tokens, and experts that
    choose tokens take as many as usual.

    Args:
        model: SwitchFeedForward or SwitchConfig. Holds `semantics`, `group_size`, `num_groups_multiple`,
            `num_experts`, `train_capacity_factor`, `eval_capacity_factor`, `min_expert_capacity` and
            `expert_capacity`.
        shape: (sequences, length), ints or int32 scalar tensors.
        training: bool. Requires a batch that divides into groups, see `plan_groups`.
        experts_choose: bool. Experts choose tokens.

    Raises:
        ValueError: A training batch does not divide into groups.
    """
    if rules_of(model.semantics).groups_are_sequences:
        return Plan(Groups(*shape), model.expert_capacity)
    if context.current().no_drop and not training and not experts_choose:
        return Plan(Groups(*shape), shape[1])
    groups = plan_groups(shape, model.group_size, model.num_groups_multiple, training, model.semantics)
    factor = model.train_capacity_factor if training else model.eval_capacity_factor
    return Plan(groups, expert_capacity(groups.size, factor, model.num_experts, model.min_expert_capacity,
                                        model.semantics))


def global_groups(num_tokens: int, group_size: int, num_groups_multiple: int, semantics="switch_tf") -> Groups | None:
    """Returns the fewest equal groups of at most `group_size` tokens, a multiple of `num_groups_multiple` in number.

    Returns None if `num_tokens` cannot be divided that way. With `Rules.may_exceed_group_size` (Mesh TensorFlow, T5X)
    the search starts at num_tokens // group_size groups.

    Args:
        num_tokens: int. Tokens of the global batch.
        group_size, num_groups_multiple: int, at least 1.
        semantics: str, see `semantics.rules_of`.
    """
    if num_tokens % num_groups_multiple:
        return None
    quotient = num_tokens // num_groups_multiple
    first = _fewest_groups(num_tokens, group_size, semantics)
    for factor in range(max(1, -(-first // num_groups_multiple)), quotient + 1):
        if quotient % factor == 0:
            return Groups(num_groups_multiple * factor, quotient // factor)
    return None


def _fewest_groups(num_tokens, group_size, semantics):
    """Returns the first number of groups to try: int or int32 scalar tensor, as `num_tokens`."""
    if rules_of(semantics).may_exceed_group_size:
        return num_tokens // group_size
    return -(-num_tokens // group_size)


def check_batch(num_sequences: int, length: int, group_size: int, num_groups_multiple: int, num_parts: int = 1,
                semantics="switch_tf") -> None:
    """Checks that a training batch divides into groups.

    Args:
        num_sequences, length: int. Shape of the global batch.
        group_size, num_groups_multiple, semantics: See `global_groups`.
        num_parts: int. Parts of the batch that must each hold whole groups.

    Raises:
        ValueError: It does not. Names the nearest batch sizes that do.
    """
    num_tokens = num_sequences * length
    groups = global_groups(num_tokens, group_size, num_groups_multiple, semantics)
    if groups:
        partitioning.check_parts(groups.count, num_parts)
        return
    step = num_groups_multiple // math.gcd(length, num_groups_multiple)
    below = num_sequences // step * step
    batches = [str(batch) for batch in (below, below + step) if batch]
    divisor = math.gcd(num_tokens, num_groups_multiple)
    raise Refusal(
        f"No number of groups that is a multiple of {num_groups_multiple} divides {num_tokens} tokens "
        f"({num_sequences} sequences of {length}) into groups of at most {group_size}. "
        f"Use a batch of {' or '.join(batches)} sequences, or num_groups_multiple={divisor}.")


def plan_groups(shape, group_size: int, num_groups_multiple: int, training: bool, semantics="switch_tf") -> Groups:
    """Returns the groups of this part of the batch.

    A training batch of known size must divide into groups. Any other batch is padded by the caller with masked tokens
    to `count * size`.

    Args:
        shape: (sequences, length) of this part, ints or int32 scalar tensors.
        group_size, num_groups_multiple, semantics: See `global_groups`.
        training: bool.

    Raises:
        ValueError: A training batch does not divide, or a partitioned batch has an unknown size.
    """
    part = context.current().part
    num_tokens = shape[0] * shape[1]
    if not isinstance(num_tokens, int):
        if part.count > 1:
            raise Refusal("The batch size must be known while tracing where a batch is cut into parts; give the "
                          "input signature a batch size.")
        return _dynamic_groups(num_tokens, group_size, num_groups_multiple, semantics)
    if training:
        check_batch(shape[0] * part.count, shape[1], group_size, num_groups_multiple, part.count, semantics)
    filled = -(-num_tokens * part.count // num_groups_multiple) * num_groups_multiple
    groups = global_groups(max(filled, num_groups_multiple), group_size, num_groups_multiple, semantics)
    return Groups(partitioning.share_of_groups(groups.count), groups.size)


def _dynamic_groups(num_tokens, group_size, num_groups_multiple, semantics) -> Groups:
    """Computes `global_groups` in the graph, for int32 scalar tokens padded to a multiple of `num_groups_multiple`."""
    quotient = ops.maximum(-(-num_tokens // num_groups_multiple), 1)
    first = _fewest_groups(quotient * num_groups_multiple, group_size, semantics)
    factors = ops.arange(1, quotient + 1, dtype="int32")
    is_valid = ops.logical_and(ops.equal(quotient % factors, 0), factors * num_groups_multiple >= first)
    factor = ops.min(ops.where(is_valid, factors, quotient))
    return Groups(num_groups_multiple * factor, quotient // factor)


def expert_capacity(group_tokens, capacity_factor: float, num_experts: int, min_expert_capacity: int,
                    semantics="switch_tf"):
    """Returns the slots of each expert in a group, by equation 3 of the paper.

    Rounds down, then applies the minimum, then the limit of the group's tokens. `Rules` may change the rounding, the
    limit and the order.

    Args:
        group_tokens: int or int32 scalar tensor.
        capacity_factor: float in [1e-6, 1e6].
        num_experts: int.
        min_expert_capacity: int, at least 1.
        semantics: str, see `semantics.rules_of`.

    Returns:
        int, or int32 scalar tensor.
    """
    rules = rules_of(semantics)
    # A fraction, so that no product falls short of an integer by a rounding error of binary floating point.
    # A limited denominator keeps products within int64 in the graph: str(0.1 + 0.2) has seventeen digits.
    ratio = fractions.Fraction(str(capacity_factor)).limit_denominator(10**6) / num_experts
    if isinstance(group_tokens, int):
        capacity = round(group_tokens * ratio) if rules.rounds_capacity else math.floor(group_tokens * ratio)
        minimum, maximum = min, max
    else:
        product, divisor = ops.cast(group_tokens, "int64") * ratio.numerator, ratio.denominator
        capacity = product // divisor
        if rules.rounds_capacity:
            twice_rest = 2 * (product % divisor)
            is_up = ops.logical_or(twice_rest > divisor, ops.logical_and(twice_rest == divisor, capacity % 2 == 1))
            capacity = capacity + ops.cast(is_up, "int64")
        capacity, minimum, maximum = ops.cast(capacity, "int32"), ops.minimum, ops.maximum
    if not rules.limits_capacity:
        return maximum(capacity, min_expert_capacity)
    if rules.minimum_is_last:
        return maximum(minimum(capacity, group_tokens), min_expert_capacity)
    return minimum(maximum(capacity, min_expert_capacity), group_tokens)
