"""Groups and expert capacity for a batch. They depend on the global batch, never on the layout."""

import fractions
import math
from typing import Any, NamedTuple

from keras import ops

from switch_tf import context, partitioning
from switch_tf.configs.semantics import Grouping
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class Groups(NamedTuple):
    """`count` groups of `size` tokens: int32 scalar tensors if the number of tokens is unknown."""

    count: Any
    size: Any


class Plan(NamedTuple):
    """Groups of a batch.

    Attributes:
        capacity: int or int32 scalar tensor. Slots of each expert per group.
        shape: (sequences, length) after added rows or columns of zeros. Masked tokens fill the rest of `groups`.
    """

    groups: Groups
    capacity: Any
    shape: tuple[int | Tensor, int | Tensor]


def plan(grouping: Grouping, shape: tuple[int | Tensor, int | Tensor], training: bool,
         experts_choose: bool = False) -> Plan:
    """Returns the groups and the capacity for this part of a batch.

    Without drops each sequence is a group, but rules with `groups_are_sequences` (a Hugging Face encoder) and experts
    that choose tokens keep their capacity.

    `shape` is (sequences, length), ints or int32 scalar tensors.
    """
    if grouping.rules.groups_are_sequences:
        # An expert takes each token once.
        minimum = min if isinstance(shape[1], int) else ops.minimum
        return Plan(Groups(*shape), minimum(grouping.expert_capacity, shape[1]), shape)
    if context.current().no_drop and not training and not experts_choose:
        return Plan(Groups(*shape), shape[1], shape)
    if grouping.rules.groups_fit_experts and not training:
        shape = _completed(shape, grouping.groups_multiple)
    groups = plan_groups(shape, grouping, training)
    return Plan(groups, expert_capacity(groups.size, grouping, training), shape)


def _completed(shape, multiple):
    """Adds rows or columns, whichever is less, for a multiple of tokens (Flaxformer)."""
    rows, columns = shape
    # Each part of a batch is completed separately.
    multiple //= math.gcd(multiple, context.current().part.count)
    more_rows = -rows % (multiple // _common_divisor(columns, multiple))
    more_columns = -columns % (multiple // _common_divisor(rows, multiple))
    adds_rows = more_columns * rows > more_rows * columns
    if isinstance(adds_rows, bool):
        return (rows + more_rows, columns) if adds_rows else (rows, columns + more_columns)
    return rows + ops.where(adds_rows, more_rows, 0), columns + ops.where(adds_rows, 0, more_columns)


def _common_divisor(size, multiple):
    if isinstance(size, int):
        return math.gcd(size, multiple)
    # Not ops.gcd: XLA computes no shapes from its loop.
    divisors = ops.convert_to_tensor([one for one in range(1, multiple + 1) if multiple % one == 0], "int32")
    return ops.max(ops.where(ops.equal(size % divisors, 0), divisors, 1))


def global_groups(num_tokens: int, grouping: Grouping) -> Groups | None:
    """Returns the fewest equal groups of at most `group_size` tokens of a global batch, or None if it is indivisible.

    Their number is a multiple of `groups_multiple`. With `Rules.may_exceed_group_size` (Mesh TensorFlow, T5X) the
    search starts at num_tokens // group_size groups.
    """
    multiple = grouping.groups_multiple
    if num_tokens % multiple:
        return None
    quotient = num_tokens // multiple
    first = _fewest_groups(num_tokens, grouping)
    for factor in range(max(1, -(-first // multiple)), quotient + 1):
        if quotient % factor == 0:
            return Groups(multiple * factor, quotient // factor)
    return None


def _fewest_groups(num_tokens, grouping):
    if grouping.rules.may_exceed_group_size:
        return num_tokens // grouping.group_size
    return -(-num_tokens // grouping.group_size)


def check_batch(num_sequences: int, length: int, grouping: Grouping, num_parts: int = 1) -> None:
    """Raises Refusal unless a training batch divides into groups. Names the nearest batch sizes that do.

    Args:
        num_sequences, length: Shape of the global batch.
        num_parts: Parts of the batch, each with whole groups.
    """
    num_tokens, multiple = num_sequences * length, grouping.groups_multiple
    groups = global_groups(num_tokens, grouping)
    if groups:
        partitioning.check_parts(groups.count, num_parts)
        return
    step = multiple // math.gcd(length, multiple)
    below = num_sequences // step * step
    batches = [str(batch) for batch in (below, below + step) if batch]
    divisor = math.gcd(num_tokens, multiple)
    other = "" if grouping.rules.groups_fit_experts else f", or num_groups_multiple={divisor}"
    raise Refusal(
        f"No number of groups that is a multiple of {multiple} divides {num_tokens} tokens "
        f"({num_sequences} sequences of {length}) into groups of at most {grouping.group_size}. "
        f"Use a batch of {' or '.join(batches)} sequences{other}.")


def plan_groups(shape: tuple[int | Tensor, int | Tensor], grouping: Grouping, training: bool) -> Groups:
    """Returns the groups of this part of the batch.

    A training batch of known size must divide into groups. The caller pads other batches to `count * size`. A
    partitioned batch needs a known size.

    `shape` is (sequences, length) of this part.
    """
    part, multiple = context.current().part, grouping.groups_multiple
    num_tokens = shape[0] * shape[1]
    if not isinstance(num_tokens, int):
        if part.count > 1:
            raise Refusal("The batch size must be known while tracing where a batch is cut into parts; give the "
                          "input signature a batch size.")
        # `global_groups` in the graph, for tokens padded to a multiple of `groups_multiple`.
        quotient = ops.maximum(-(-num_tokens // multiple), 1)
        first = _fewest_groups(quotient * multiple, grouping)
        factors = ops.arange(1, quotient + 1, dtype="int32")
        is_valid = ops.equal(quotient % factors, 0) & (factors * multiple >= first)
        factor = ops.min(ops.where(is_valid, factors, quotient))
        return Groups(multiple * factor, quotient // factor)
    if training:
        check_batch(shape[0] * part.count, shape[1], grouping, part.count)
    filled = -(-num_tokens * part.count // multiple) * multiple
    groups = global_groups(max(filled, multiple), grouping)
    return groups._replace(count=partitioning.share_of_groups(groups.count))


def expert_capacity(group_tokens: int | Tensor, grouping: Grouping, training: bool) -> int | Tensor:
    """Returns an expert's slots in a group, by equation 3 of the paper.

    Rounds down, applies the minimum, then limits to the group's tokens. `Rules` may change rounding, limit and order.
    Tensors are int32 scalars.
    """
    rules, least = grouping.rules, grouping.min_expert_capacity
    factor = grouping.train_capacity_factor if training else grouping.eval_capacity_factor
    if isinstance(group_tokens, int):
        minimum, maximum, cast, rounded, cut = min, max, lambda number, dtype: number, round, int
    else:
        minimum, maximum, cast, rounded, cut = ops.minimum, ops.maximum, ops.cast, ops.round, ops.floor
    if rules.is_exact:
        # Keeps products in the graph within int64: str(0.1 + 0.2) has seventeen digits.
        ratio = fractions.Fraction(str(factor)).limit_denominator(10**6) / grouping.num_experts
        capacity = cast(group_tokens, "int64") * ratio.numerator // ratio.denominator
    else:
        capacity = cast(group_tokens, "float64") * factor / grouping.num_experts
        capacity = (rounded if rules.rounds_capacity else cut)(capacity)
    capacity = cast(capacity, "int32")
    if not rules.limits_capacity:
        return maximum(capacity, least)
    if rules.minimum_is_last:
        return maximum(minimum(capacity, group_tokens), least)
    return minimum(maximum(capacity, least), group_tokens)
