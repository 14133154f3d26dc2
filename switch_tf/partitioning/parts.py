"""The part of the global batch that code sees: a microbatch, a replica's rows, or a microbatch of a replica.

Groups of tokens and random numbers belong to the global batch, so that one pass over the batch and several passes over
its parts make the same routing decisions and the same dropout masks.
"""

from contextlib import AbstractContextManager
from typing import Any

from switch_tf import context
from switch_tf.refusals import Refusal


def part_of_batch(count: int, index: Any) -> AbstractContextManager:
    """Returns a scope in which code sees part `index`, int or int32 scalar tensor, of `count` parts of the batch."""
    return context.within(part=context.Part(count, index))


def share_of_groups(num_groups: int) -> int:
    """Returns this part's share of the global batch's groups.

    Raises:
        Refusal: Parts cannot hold whole groups.
    """
    count = context.current().part.count
    check_parts(num_groups, count)
    return num_groups // count


def check_parts(num_groups: int, num_parts: int) -> None:
    """Raises Refusal unless each of `num_parts` parts of the batch holds whole groups."""
    if num_groups % num_parts:
        raise Refusal(
            f"A batch routed in {num_groups} groups cannot be cut into {num_parts} parts of whole groups (microbatches "
            f"times devices of the data axis). Set num_groups_multiple to a multiple of {num_parts}, or use fewer of "
            "them.")
