"""Calls through gin: a mistake in a value is refused in one sentence, and a bug keeps its traceback."""

import itertools
import traceback
from collections.abc import Callable
from typing import Any

from switch_tf.refusals import Refusal, first_line

_PACKAGE = __name__.partition(".")[0]


def or_mistake(action: Callable[[], Any]) -> Any:
    """Returns the result of a call of gin's, and refuses what gin, Keras or the user's code finds wrong with a value.

    Raises:
        Refusal: gin lacks a value, or what it calls outside of this package does not take one.
        Exception: A call of this package failed. It checks its own values, so anything but a Refusal is a bug.
    """
    try:
        return action()
    except (RuntimeError, ValueError, TypeError) as error:
        if not isinstance(error, Refusal) and _is_our_bug(error):
            raise
        sentence = ("These gin files lead back to themselves: a parameter is set to something that the parameter is "
                    "part of." if isinstance(error, RecursionError) else first_line(error))
        raise Refusal(sentence) from error


def _is_our_bug(error):
    """Returns True if the innermost call of gin's entered this package, or no call of gin's was under way."""
    # gin replaces an exception by a proxy with the traceback of the original, so its frames still tell.
    modules = [frame.f_globals.get("__name__", "").partition(".")[0]
               for frame, _ in traceback.walk_tb(error.__traceback__)]
    behind_gin = itertools.takewhile(lambda module: module != "gin", reversed(modules))
    return [*behind_gin][-1:] == [_PACKAGE]
