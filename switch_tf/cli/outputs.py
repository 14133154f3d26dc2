"""Lets one process at a time write to the output of a command."""

import contextlib
from collections.abc import Iterator

from switch_tf.refusals import Refusal
from switch_tf.storage import output_lock


@contextlib.contextmanager
def locked(output, argument: str = "--output") -> Iterator[None]:
    """Keeps other processes from writing an output within this scope, see `output_lock.held`.

    Raises:
        Refusal: another process writes it, or nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(output_lock.held(output, argument))
        except output_lock.InUse as error:
            raise Refusal(str(error)) from error
        except OSError as error:
            raise Refusal(f"{argument} {str(output)!r} cannot be written ({error.strerror}); name another one."
                          ) from error
        yield
