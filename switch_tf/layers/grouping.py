"""How the tokens of a batch are cut into groups, and how many slots an expert has for each group.

Groups belong to the model, never to the layout (`partitioning.parts`): the global batch decides how many there are.
"""

import fractions
import math
from typing import Any, NamedTuple

from keras import ops

from switch_tf import partitioning


class Groups(NamedTuple):
    """`count` groups of `size` tokens; ints, or int32 scalar tensors where the number of tokens is unknown."""

    count: Any
    size: Any


def global_groups(num_tokens: int, group_size: int, num_groups_multiple: int, semantics="switch_tf") -> Groups | None:
    """The fewest groups, a multiple of `num_groups_multiple`, that divide `num_tokens` into at most `group_size` each.

    None where there are none. With semantics "mtf" and "t5x" the search starts at num_tokens // group_size groups, as
    in Mesh TensorFlow and T5X, so that a group may be larger than `group_size`.
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
    """Where the search for a number of groups starts: tokens over group size, rounded up, or down by "mtf", "t5x"."""
    return num_tokens // group_size if semantics in ("mtf", "t5x") else -(-num_tokens // group_size)


def check_batch(num_sequences: int, length: int, group_size: int, num_groups_multiple: int, num_parts: int = 1,
                semantics="switch_tf") -> None:
    """Raises ValueError, naming the nearest batches that work, unless a training batch can be cut into groups.

    Args:
        num_sequences, length: int, of the global batch.
        num_parts: int. Each of so many parts must hold whole groups.
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
    raise ValueError(
        f"No number of groups that is a multiple of {num_groups_multiple} divides {num_tokens} tokens "
        f"({num_sequences} sequences of {length}) into groups of at most {group_size}. "
        f"Use a batch of {' or '.join(batches)} sequences, or num_groups_multiple={divisor}.")


def plan_groups(shape, group_size: int, num_groups_multiple: int, training: bool, semantics="switch_tf") -> Groups:
    """Groups of this part of the batch, whose tokens are `shape` = (sequences, length), ints or scalar tensors.

    In training the batch must divide. Otherwise, and where its size is unknown while tracing, the caller fills it up
    with masked tokens to `count * size`.
    """
    part = partitioning.current_part()
    num_tokens = shape[0] * shape[1]
    if not isinstance(num_tokens, int):
        if part.count > 1:
            raise ValueError("The batch size must be known while tracing where a batch is cut into parts; give the "
                             "input signature a batch size.")
        return _dynamic_groups(num_tokens, group_size, num_groups_multiple, semantics)
    if training:
        check_batch(shape[0] * part.count, shape[1], group_size, num_groups_multiple, part.count, semantics)
    filled = -(-num_tokens * part.count // num_groups_multiple) * num_groups_multiple
    groups = global_groups(max(filled, num_groups_multiple), group_size, num_groups_multiple, semantics)
    return Groups(partitioning.share_of_groups(groups.count), groups.size)


def _dynamic_groups(num_tokens, group_size, num_groups_multiple, semantics) -> Groups:
    """The same rule in the graph, on the tokens filled up to a multiple of `num_groups_multiple`."""
    quotient = ops.maximum(-(-num_tokens // num_groups_multiple), 1)
    first = _fewest_groups(quotient * num_groups_multiple, group_size, semantics)
    factors = ops.arange(1, quotient + 1, dtype="int32")
    is_valid = ops.logical_and(ops.equal(quotient % factors, 0), factors * num_groups_multiple >= first)
    factor = ops.min(ops.where(is_valid, factors, quotient))
    return Groups(num_groups_multiple * factor, quotient // factor)


def expert_capacity(group_tokens, capacity_factor: float, num_experts: int, min_expert_capacity: int,
                    semantics="switch_tf"):
    """Slots of each expert in a group: equation 3 rounded down, at least the minimum, at most the group's tokens.

    Args:
        group_tokens: int or int32 scalar tensor.
        semantics: with "mtf" the minimum is taken last, so that it may exceed the group's tokens; with "t5x" the
            quotient is rounded to the nearest integer, halves to even, and nothing limits it to the group's tokens.

    Returns:
        int, or int32 scalar tensor.
    """
    # In integers, so that 1.1 * 1000 / 10 is 110 and not what its binary neighbour rounds to.
    ratio = fractions.Fraction(str(capacity_factor)) / num_experts
    if isinstance(group_tokens, int):
        capacity = round(group_tokens * ratio) if semantics == "t5x" else math.floor(group_tokens * ratio)
        minimum, maximum = min, max
    else:
        product, divisor = ops.cast(group_tokens, "int64") * ratio.numerator, ratio.denominator
        capacity = product // divisor
        if semantics == "t5x":
            twice_rest = 2 * (product % divisor)
            is_up = ops.logical_or(twice_rest > divisor, ops.logical_and(twice_rest == divisor, capacity % 2 == 1))
            capacity = capacity + ops.cast(is_up, "int64")
        capacity, minimum, maximum = ops.cast(capacity, "int32"), ops.minimum, ops.maximum
    if semantics == "t5x":
        return maximum(capacity, min_expert_capacity)
    if semantics == "mtf":
        return maximum(minimum(capacity, group_tokens), min_expert_capacity)
    return minimum(maximum(capacity, min_expert_capacity), group_tokens)
