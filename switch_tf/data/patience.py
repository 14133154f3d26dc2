"""Calls that may never return, such as a read from a pipe without a writer."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_LOOK_PERIOD = 0.1  # seconds


class GivenUp(Exception):
    """A call was given up. It continues in its thread and keeps its resources."""


class Call:
    """A call that starts in a thread of its own.

    Args:
        function: Function without arguments.
    """

    def __init__(self, function: Callable[[], Any]):
        self._results: queue.SimpleQueue = queue.SimpleQueue()

        def run():
            try:
                self._results.put((function(), None))
            except BaseException as error:  # raised again in the waiting thread
                self._results.put((None, error))

        threading.Thread(target=run, name="patience", daemon=True).start()

    def result(self, gives_up: Callable[[], bool]) -> Any:
        """Waits for the result and returns it, once.

        Args:
            gives_up: Function that is polled; True ends the wait.

        Raises:
            GivenUp: `gives_up()` became true first.
            BaseException: The exception of the function or of `gives_up`.
        """
        while True:
            try:
                result, error = self._results.get(timeout=_LOOK_PERIOD)
            except queue.Empty:
                if gives_up():
                    raise GivenUp from None
                continue
            if error is not None:
                raise error
            return result
