"""Calls that may never return, such as a read from a pipe without a writer."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_LOOK_PERIOD = 0.1  # seconds


class GivenUp(Exception):
    """A call was given up. It continues in its thread and keeps its resources."""


def call(function: Callable, gives_up: Callable[[], bool]) -> Any:
    """Calls a function in a new thread and returns its result.

    Args:
        function: Function without arguments.
        gives_up: Function that is polled; True ends the wait.

    Raises:
        GivenUp: `gives_up()` became true first.
        BaseException: The exception of `function` or `gives_up`.
    """
    results = queue.SimpleQueue()

    def run():
        try:
            results.put((function(), None))
        except BaseException as error:  # raised again in the waiting thread
            results.put((None, error))

    threading.Thread(target=run, name="patience", daemon=True).start()
    while True:
        try:
            result, error = results.get(timeout=_LOOK_PERIOD)
        except queue.Empty:
            if gives_up():
                raise GivenUp from None
            continue
        if error is not None:
            raise error
        return result
