"""Ctrl-C, SIGTERM and SIGHUP during training: the first signal stops in order, the second one ends the process.

A thread waits for the signals, because Python runs handlers only when the main thread is back in Python, and a dataset
that yields nothing, or a process that waits for others, keeps it away for good.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from switch_tf.statuses import INTERRUPTED
from switch_tf.storage import outputs

# SIGHUP arrives when a terminal or an ssh session is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ONE_REQUEST = 5  # seconds in which signals of a parent that has ended count as one


def not_ignored() -> list[signal.Signals]:
    """Returns the `SIGNALS` that this process does not ignore; under `nohup` it ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class _Listening:
    """A context in which a thread receives the signals that this process does not ignore."""

    def __init__(self):
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._previous, self._outer = {}, -1

    def __enter__(self):
        self._previous = {number: signal.signal(number, lambda *_: None) for number in not_ignored()}
        self._outer = signal.set_wakeup_fd(self._write_end)
        self._thread.start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(self._outer)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_end)  # which ends the thread
        self._thread.join()
        os.close(self._read_end)

    def _listen(self):
        while number := os.read(self._read_end, 1):
            if number[0] in self._previous:
                outputs.discard_closed()
                self._heard(signal.Signals(number[0]))

    def _heard(self, number):
        raise NotImplementedError


class Ending(_Listening):
    """A context in which a signal ends the process by that signal, with a line of text, whatever it waits for.

    Args:
        command: Name of the command, for the line.
    """

    def __init__(self, command: str):
        super().__init__()
        self._command = command

    def _heard(self, number):
        outputs.end(-number, f"switch-tf {self._command}: interrupted by {number.name}.")


class Stopping(_Listening):
    """A context in which the first signal sets the `reason` to stop, and a second one ends the process at once.

    Args:
        say: Function that prints a line of text.
    """

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self.reason: str | None = None
        self._say = say
        self._parent, self._asked_at = os.getppid(), 0.0

    def _heard(self, number):
        if self.reason and self._is_of_ended_parent():
            return
        if self.reason:
            outputs.end(INTERRUPTED, f"{number.name} once more: ended without saving.")
        self.reason, self._asked_at = number.name, time.monotonic()
        self._say(f"{number.name}: saving after this step; once more stops without saving.")

    def _is_of_ended_parent(self):
        """Whether a signal repeats the first one, which the kernel sends for each thread of a parent that ends."""
        return os.getppid() != self._parent and time.monotonic() - self._asked_at < _ONE_REQUEST
