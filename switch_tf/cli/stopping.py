"""Ctrl-C and SIGTERM while a command trains: the first is a wish to stop in order, a second one ends the process."""

import os
import signal
import sys
import threading

from switch_tf.cli.processes import INTERRUPTED


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

    def __enter__(self):
        self._previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
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
            if self.reason:
                print(f"{name} once more: ended without saving.", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            self.reason = name
            self._say(f"{name}: saving after this step; once more stops without saving.")
