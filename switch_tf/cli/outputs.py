"""Lets one process at a time write to the output of a command."""

import contextlib
from collections.abc import Iterator

from switch_tf.storage import output_lock


@contextlib.contextmanager
def locked(output, argument: str = "--output") -> Iterator[None]:
    """Keeps other processes from writing an output within this scope, see `output_lock.held`.

    Raises:
        Refusal: another process writes it, or nothing can be written there.
    """
    with output_lock.held(output, argument):
        yield
