"""Ctrl-C, SIGTERM and SIGHUP while a command trains: the first stops in order, a second one ends the process."""

import os
import select
import signal
import sys
import threading
import time

INTERRUPTED = 130  # exit status, as a shell has it after Ctrl-C
# SIGHUP comes when a terminal or an ssh session is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ONE_REQUEST = 5  # seconds in which signals of a parent that has ended count as one


def not_ignored() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process reacts to; `nohup` has SIGHUP ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Stopping:
    """Within this context the first signal becomes the `reason` to stop, and a second one ends the process at once.

    A thread of its own hears them, because Python runs a handler only when the main thread comes back from what it
    waits for, and a dataset that yields nothing keeps it for good.

    Args:
        say: function of a line of text.
    """

    def __init__(self, say):
        self.reason: str | None = None
        self._say = say
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._previous = {}
        self._parent, self._asked_at = os.getppid(), 0.0

    def __enter__(self):
        self._previous = {number: signal.signal(number, lambda *_: None) for number in not_ignored()}
        signal.set_wakeup_fd(self._told)
        self._thread.start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._told)  # which ends the thread
        self._thread.join()
        os.close(self._heard)

    def _listen(self):
        while number := os.read(self._heard, 1):
            if number[0] not in self._previous:
                continue
            name = signal.Signals(number[0]).name
            _silence_closed_outputs()
            if self.reason and self._is_of_ended_parent():
                continue
            if self.reason:
                print(f"{name} once more: ended without saving.", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            self.reason, self._asked_at = name, time.monotonic()
            self._say(f"{name}: saving after this step; once more stops without saving.")

    def _is_of_ended_parent(self):
        """Whether a signal repeats the first one: the kernel sends it again for each thread of a parent that ends."""
        return os.getppid() != self._parent and time.monotonic() - self._asked_at < _ONE_REQUEST


def _silence_closed_outputs():
    """Discards output that nobody can read any more, because the terminal is closed or the parent was killed.

    Writing there raises, and the run would end before it has saved.
    """
    poller = select.poll()
    for output in (1, 2):
        poller.register(output, 0)  # reports errors alone
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output, _ in poller.poll(0):
        os.dup2(nowhere, output)
    os.close(nowhere)
