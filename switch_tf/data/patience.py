"""Calls that may never return, such as a read from a pipe that nobody writes to."""

import queue
import threading
from collections.abc import Callable

_LOOK_PERIOD = 0.1  # seconds


class GivenUp(Exception):
    """A call was given up. It continues in its thread and keeps its resources."""


def call(function: Callable, gives_up: Callable[[], bool]):
    """Returns what a function returns, which is called in a thread of its own.

    Args:
        function: function without arguments.
        gives_up: function that is asked now and then whether to wait no longer.

    Raises:
        GivenUp: `gives_up()` came true first.
        whatever `function` or `gives_up` raises.
    """
    results = queue.SimpleQueue()

    def run():
        try:
            results.put((function(), None))
        except BaseException as error:  # whatever it is, who waits hears of it
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
