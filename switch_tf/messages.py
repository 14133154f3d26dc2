"""What an exception says, in one line, for a sentence that says the rest."""

import re

# TensorFlow's names for the operation that failed, before and after its message.
_OPERATION = re.compile(r"\{\{.*?\}\}\s*|\s*\[(Op:|\[\{\{).*$")


def first_line(error: BaseException | str) -> str:
    """The message without what gin, AutoGraph or TensorFlow put around it; the kind of exception where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_wrapped = lines[0].startswith("in user code")  # AutoGraph's; the message is at the end of its traceback
    return _OPERATION.sub("", lines[-1 if is_wrapped else 0]).strip() or type(error).__name__


def sentence_about_data(error: BaseException) -> str | None:
    """What a source has said of its data in a `BadData`, passed on by TensorFlow or not; None of any other error."""
    if type(error).__name__ == "BadData":
        return str(error)
    found = re.search(r"\bBadData: (.*)", str(error))
    return found and found[1]
