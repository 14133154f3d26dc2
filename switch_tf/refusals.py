"""The exception for mistakes of users, printed by commands as one sentence, and one line of any other exception."""

import re

from switch_tf import statuses

# TensorFlow's names for the failed operation or iterators, before and after its message.
_OPERATION = re.compile(r"\{\{.*?\}\}\s*|\s*\[(Op:|\[\{\{).*$|"
                        r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")


class Refusal(ValueError):
    """A mistake of the user in one sentence: the rule, the value received and the way out.

    Any other exception is a bug in this package, shown with its traceback.

    Attributes:
        exit_status: Exit status of the failed command, one of `statuses`.
    """

    exit_status = statuses.REFUSED
    # With these attributes, Keras and AutoGraph re-raise the exception unchanged, and not as a paragraph about the call
    # of a layer or traced function.
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
    """Returns the message of a `data.BadData`, even if wrapped in an error of TensorFlow; otherwise None."""
    if type(error).__name__ in ("BadData", "UnreachableData"):
        return str(error)
    match = re.search(r"\b(?:Bad|Unreachable)Data: (.*)", str(error))
    return match[1] if match else None
