"""Signals during training: the first one stops in order, the second one ends the process.

A thread waits for the signals, because Python runs handlers only when the main thread is back in Python, and a dataset
that yields nothing, or a process that waits for others, keeps it away for good.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.statuses import INTERRUPTED
from switch_tf.storage import outputs

# SIGHUP arrives when a terminal or an ssh session is closed. Slurm announces the end of a job by the user's.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Seconds in which a signal repeats the one before it. `timeout` sends two, and the kernel one for each thread of a
# parent that ends. Of Ctrl-C every one counts, because a person presses it.
_ONE_REQUEST, _ONE_REQUEST_OF_ENDED_PARENT = 2, 5
_PATIENCE = 5  # seconds until a run that has not stopped by itself is saved from here


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

    A run that does not notice the reason within seconds, because it compiles or computes a metric, is saved from here.

    Args:
        say: Function that prints a line of text.
    """

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self.reason: str | None = None
        self._say = say
        self._trainings: Sequence[Any] = ()
        self._parent = os.getppid()
        self._heard_at: float | None = None  # of the first signal
        self._ended = threading.Event()

    def __exit__(self, *error):
        self._ended.set()
        super().__exit__(*error)

    def watch(self, trainings: Sequence[Any]) -> None:
        """Names the runs in progress, `loop.Training`, to save."""
        self._trainings = trainings

    def stop(self, reason: str, hint: str = "") -> None:
        """Asks to stop. May be called in any thread.

        Args:
            reason: What asks for it.
            hint: Further half of a sentence.
        """
        is_first, self.reason = self.reason is None, self.reason or reason
        saved = "".join(f" {training.last_save()}" for training in self._trainings[:1])
        self._say(f"{reason}: saving after this step{hint}.{saved}")
        if is_first:
            threading.Thread(target=self._rescue, name="rescue", daemon=True).start()

    def _heard(self, number):
        if number == signal.SIGUSR1 and self._trainings and self._trainings[0].run.on_sigusr1 == "save":
            self._say(f"{number.name}: saving after this step, and going on.")
            for training in self._trainings:
                training.request_save()
        elif self._heard_at is None:
            self._heard_at = time.monotonic()
            self.stop(number.name, "; once more stops without saving")
        elif not self._is_repeated(number):
            outputs.end(INTERRUPTED, f"{number.name} once more: ended without saving.")

    def _is_repeated(self, number):
        limit = _ONE_REQUEST_OF_ENDED_PARENT if os.getppid() != self._parent else (
            0 if number == signal.SIGINT else _ONE_REQUEST)
        return time.monotonic() - self._heard_at < limit

    def _rescue(self):
        """Saves all runs and ends the process as soon as no run is in a training step."""
        while not self._ended.wait(_PATIENCE):
            try:
                told = [training.rescue(self.reason) for training in self._trainings]
            except Refusal as refusal:
                outputs.end(refusal.exit_status, str(refusal))
            if told and all(told):
                outputs.end(INTERRUPTED, "\n".join(told))
