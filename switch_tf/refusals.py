"""The exception for mistakes of users, which commands print as one sentence, and one line of any other exception."""

import re

from switch_tf import statuses

# TensorFlow's names for the operation or the iterators that failed, before and after its message.
_OPERATION = re.compile(r"\{\{.*?\}\}\s*|\s*\[(Op:|\[\{\{).*$|"
                        r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")


class Refusal(ValueError):
    """A mistake of the user in one sentence: the rule, the value received and the way out.

    Any other exception is a fault of this package. Commands show its traceback.

    Attributes:
        exit_status: Exit status of a command that it ends, one of `statuses`.
    """

    exit_status = statuses.REFUSED
    # Keras and AutoGraph re-raise an exception with these attributes unchanged. They would rewrite any other error of a
    # layer or of a traced function into a paragraph about its call.
    _keras_call_info_injected = True
    ag_pass_through = True


class Outage(Refusal):
    """The failure of a disk, a bucket or another process, which may pass: the same command resumes its run."""

    exit_status = statuses.OUTAGE


def first_line(error: BaseException | str) -> str:
    """Returns a message without the wrapping of gin, AutoGraph or TensorFlow, or the class of an empty exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_wrapped = lines[0].startswith("in user code")  # by AutoGraph, which puts its traceback before the message
    return _OPERATION.sub("", lines[-1 if is_wrapped else 0]).strip() or type(error).__name__


def sentence_about_data(error: BaseException) -> str | None:
    """Returns the sentence of a `data.BadData`, also if TensorFlow passed it on as an error of its own, else None."""
    if type(error).__name__ in ("BadData", "UnreachableData"):
        return str(error)
    match = re.search(r"\b(?:Bad|Unreachable)Data: (.*)", str(error))
    return match[1] if match else None
