"""Tells failures of disks, buckets and networks, which may pass, from mistakes of the user."""

import contextlib
import errno
import gzip
from collections.abc import Iterator

from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.refusals import Refusal
from switch_tf.statuses import DIVERGED, OUTAGE, REFUSED

# Before a run has begun, other errors of the file system mostly come from a mistaken path.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
# Classes of TensorFlow's errors by name, since a command that refuses its arguments need not import it.
_PASSING_CLASSES = {"UnavailableError", "DeadlineExceededError", "AbortedError", "ResourceExhaustedError"}
_LASTING_CLASSES = {"DataLossError", "InvalidArgumentError"}
_OF_PYTHON = "Traceback (most recent call last)"  # in an error of TensorFlow, which called the function of a dataset


@contextlib.contextmanager
def at_start() -> Iterator[None]:
    """Gives a Refusal within this scope the exit status of an outage if such an error is never the user's mistake."""
    try:
        yield
    except Refusal as refusal:
        classify(refusal, is_running=False)
        raise


def classify(refusal: Refusal, is_running: bool = True) -> None:
    """Sets the exit status of a Refusal by its causes, unless its class or an earlier call has set it.

    Args:
        refusal: Refusal that ends a run.
        is_running: Whether the run has begun, so that its paths were good.
    """
    if refusal.exit_status != REFUSED:
        return
    causes = _causes(refusal)
    if is_running and any(isinstance(cause, BrokenCheckpoint) for cause in causes):  # its weights are not finite
        refusal.exit_status = DIVERGED
        return
    for cause in reversed(causes):  # the first cause says most
        if (is_outage := _is_outage(cause, is_running)) is not None:
            refusal.exit_status = OUTAGE if is_outage else REFUSED
            return


def is_passing(error: BaseException) -> bool:
    """Returns whether an error of TensorFlow is one that a bucket or a disk raises for a time."""
    return bool(_is_outage(error, is_running=False))


def _causes(error):
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def _is_outage(error, is_running):
    """Returns whether an error is an outage, None for an error that does not decide it."""
    classes = {one.__name__ for one in type(error).__mro__}
    if isinstance(error, gzip.BadGzipFile):
        return False
    if isinstance(error, OSError):
        return is_running or error.errno in _PASSING
    if "OpError" not in classes:
        return None
    if "UnreachableData: " in str(error):
        return is_running
    if classes & _LASTING_CLASSES or _OF_PYTHON in str(error):
        return False
    return is_running or bool(classes & _PASSING_CLASSES)
