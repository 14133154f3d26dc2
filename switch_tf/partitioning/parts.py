"""Which share of the global batch the running code sees: a microbatch, a replica's rows, or a microbatch of those.

Groups of tokens and random numbers belong to the global batch. Code that sees only a part of it asks here for its
share, so that one pass over the whole batch and several over its parts route alike and drop out alike.
"""

import contextlib
from typing import Any, NamedTuple

from switch_tf.refusals import Refusal


class Part(NamedTuple):
    """Part `index` (int or int32 scalar tensor) of `count` equal, contiguous parts of the global batch."""

    count: int
    index: Any


_current = Part(1, 0)


def current_part() -> Part:
    """The part that the running code sees; part 0 of 1 outside of any scope."""
    return _current


@contextlib.contextmanager
def part_of_batch(count: int, index):
    """Within this scope, code sees part `index` of `count` parts."""
    global _current
    previous, _current = _current, Part(count, index)
    try:
        yield
    finally:
        _current = previous


def share_of_groups(num_groups: int) -> int:
    """This part's share of the global batch's groups; Refusal where parts cannot hold whole groups."""
    check_parts(num_groups, _current.count)
    return num_groups // _current.count


def check_parts(num_groups: int, num_parts: int) -> None:
    """Raises Refusal unless each of `num_parts` parts of the batch holds whole groups."""
    if num_groups % num_parts:
        raise Refusal(
            f"A batch routed in {num_groups} groups cannot be cut into {num_parts} parts of whole groups (microbatches "
            f"times devices of the data axis). Set num_groups_multiple to a multiple of {num_parts}, or use fewer of "
            "them.")
