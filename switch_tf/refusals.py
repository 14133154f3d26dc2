"""The exception for mistakes of users, and one line of any exception."""

import re

from switch_tf import statuses

# TensorFlow's names for the failed operation or iterators.
_OPERATION = re.compile(r"\{\{.*?\}\}\s*|\s*\[(Op:|\[\{\{).*$|"
                        r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")


class Refusal(ValueError):
    """A mistake of the user in one sentence: the rule, the value received and the way out.

    `exit_status`: One of `statuses`, for the failed command.
    """

    exit_status = statuses.REFUSED
    # Keras and AutoGraph re-raise exceptions with these unchanged, not as a paragraph about a layer's call.
    _keras_call_info_injected = True
    ag_pass_through = True


class Outage(Refusal):
    """A temporary failure of a disk, a bucket or another process. The same command resumes its run."""

    exit_status = statuses.OUTAGE


def first_line(error: BaseException | str) -> str:
    """Returns a message without gin's, AutoGraph's or TensorFlow's wrapping, or the class of an empty exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_wrapped = lines[0].startswith("in user code")  # by AutoGraph, with its traceback before the message
    return _OPERATION.sub("", lines[-1 if is_wrapped else 0]).strip() or type(error).__name__


def sentence_about_data(error: BaseException) -> str | None:
    """Returns the message of a `data.BadData`, even if TensorFlow wrapped it; otherwise None."""
    if type(error).__name__ in ("BadData", "UnreachableData"):
        return str(error)
    match = re.search(r"\b(?:Bad|Unreachable)Data: (.*)", str(error))
    return match[1] if match else None
