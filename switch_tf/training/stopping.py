"""Ends runs on signals and on notices of Google Cloud, and sets exit statuses for errors that may pass.

A thread waits for the signals: Python runs handlers only in the main thread, and a stalled dataset may block it.
"""

import contextlib
import errno
import gzip
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epy

from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.configs.run import Run
from switch_tf.hardware import host
from switch_tf.refusals import Refusal
from switch_tf.statuses import DIVERGED, INTERRUPTED, OUTAGE, REFUSED
from switch_tf.storage import outputs

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf.hardware import devices

# SIGHUP arrives when a terminal or ssh session closes. Slurm announces the end of a job by SIGUSR1 or SIGUSR2.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Seconds in which a signal repeats the first: `timeout` sends two, the kernel one for each thread of an ended parent.
# Every Ctrl-C counts.
_ONE_REQUEST, _ONE_REQUEST_OF_ENDED_PARENT = 2, 5
_BATCH_PATIENCE = 20  # seconds without a batch before a message
GRACE = 5  # seconds without a batch after a signal
_WAITING = ("The batch after step {} has been awaited for {} s. The first one waits for a shuffle buffer of a thousand "
            "examples of every task, for which small data are read over and over.")
_PATIENCE = 5  # seconds until a run that has not stopped is saved here
# A pre-empted VM has 30 seconds, one with a maintenance event 60 if the entry was read before.
_PERIOD = 2.0  # seconds between checks for a notice
# Other values mean a live migration or no event.
_MAINTENANCE = "TERMINATE_ON_HOST_MAINTENANCE"
# Before a run begins, other errors mostly come from a wrong path.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
# TensorFlow's error classes by name, to avoid its import.
_PASSING_CLASSES = {"UnavailableError", "DeadlineExceededError", "AbortedError", "ResourceExhaustedError"}
_LASTING_CLASSES = {"DataLossError", "InvalidArgumentError"}
_OF_PYTHON = "Traceback (most recent call last)"  # in TensorFlow's error for a Python function of a dataset


def not_ignored() -> list[signal.Signals]:
    """Returns the `SIGNALS` that this process does not ignore. `nohup` ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class _Listening:
    """Passes each signal that is not ignored to `_heard`, in a thread."""

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
        os.close(self._write_end)  # ends the thread
        self._thread.join()
        os.close(self._read_end)

    def _listen(self):
        while number := os.read(self._read_end, 1):
            if number[0] in self._previous:
                outputs.discard_closed()
                self._heard(signal.Signals(number[0]))


class Ending(_Listening):
    """A context in which a signal ends the process immediately, with a message."""

    def __init__(self, command: str):
        super().__init__()
        self._command = command

    def _heard(self, number):
        outputs.end(-number, f"switch-tf {self._command}: interrupted by {number.name}.")


class Stopping(_Listening):
    """A context in which the first signal sets the `reason` to stop, and a second ends the process.

    Google Cloud's notice that this TPU VM will stop is also a reason. A run that does not react within seconds is saved
    here.
    """

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self.reason: str | None = None
        self._say = say
        self._trainings: Sequence[Any] = ()
        self._parent = os.getppid()
        self._heard_at: float | None = None
        self._ended = threading.Event()

    def __enter__(self):
        if host.has_tpu() and devices.device_type() == "TPU":  # not with a remote TPU of TPU_NAME
            threading.Thread(target=self._await_notice, name="notices", daemon=True).start()
        return super().__enter__()

    def __exit__(self, *error):
        self._ended.set()
        super().__exit__(*error)

    def _await_notice(self):
        while not self._ended.is_set():
            is_maintained = host.vm_entry("maintenance-event") == _MAINTENANCE
            if is_maintained or host.vm_entry("preempted") == "TRUE":
                if self._ended.is_set():  # during the request
                    return
                self.stop("maintenance event of this VM" if is_maintained else "pre-emption of this VM")
                return
            self._ended.wait(_PERIOD)

    def watch(self, trainings: Sequence[Any]) -> None:
        """Sets the runs in progress, `loop.Training`, to save."""
        self._trainings = trainings

    def stop(self, reason: str, hint: str = "") -> None:
        """Asks to stop, in any thread. `hint` is a further half of a sentence."""
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
            self.stop(number.name, "; once more stops without saving")
            self._heard_at = time.monotonic()  # only now: a second signal waits while a busy machine prints
        else:
            limit = _ONE_REQUEST_OF_ENDED_PARENT if os.getppid() != self._parent else (
                0 if number == signal.SIGINT else _ONE_REQUEST)
            if time.monotonic() - self._heard_at >= limit:  # not a repetition
                outputs.end(INTERRUPTED, f"{number.name} once more: ended without saving.")

    def _rescue(self):
        """Saves all runs and ends the process as soon as no run is in a training step."""
        while not self._ended.wait(_PATIENCE):
            try:
                told = [training.rescue(self.reason) for training in self._trainings]
            except Refusal as refusal:
                outputs.end(refusal.exit_status, str(refusal))
            if told and all(told):
                outputs.end(INTERRUPTED, "\n".join(told))


class Requests:
    """Requests to stop a run or to save it, on which its processes agree by flags of a step.

    Attributes:
        agrees_on_saves: Whether a flag asks to save.
        stopped_by: The reason, once all processes stop, or None.
    """

    def __init__(self, run: Run, partitioner: Any):
        self._hours, self._started = run.max_hours, time.monotonic()
        self._partitioner, self._is_single = partitioner, partitioner.num_processes == 1
        self.agrees_on_saves = self._is_single or run.on_sigusr1 == "save"
        self._is_save_requested = threading.Event()
        self._is_save_agreed = False
        self.stopped_by: str | None = None

    def listen(self, stop_reason: Callable[[], str | None]) -> None:
        """Asks a function for this process's reason to stop from now on."""
        self._stop_reason, self._is_stop_agreed = stop_reason, False

    def request_save(self) -> None:
        """Asks for a checkpoint of the step under way.

        Several processes need `Run.on_sigusr1="save"`, and a request in only one.
        """
        self._is_save_requested.set()

    def flags(self) -> list[bool]:
        """Returns this process's: whether to stop and, if any process may ask for it, to save."""
        flags = [bool(self._reason())]
        if self.agrees_on_saves:
            flags.append(self._is_save_requested.is_set())
            self._is_save_requested.clear()
        return flags

    def agree(self, stops: bool, saves: bool = False) -> None:
        """Takes the flags of all processes."""
        self._is_stop_agreed |= stops
        self._is_save_agreed |= saves

    def takes_save(self) -> bool:
        """Whether to save now, once for each request."""
        is_agreed, self._is_save_agreed = self._is_save_agreed, False
        return is_agreed

    def stops(self, in_step: bool = False) -> bool:
        """Whether all processes stop. They agree now, or between steps by the flags of steps that ended."""
        reason = self._reason()
        if not in_step or self._is_single:
            self._is_stop_agreed = self._partitioner.any_process(bool(reason))
        self.stopped_by = (reason or "a signal or notice to another process") if self._is_stop_agreed else None
        return self._is_stop_agreed

    def _reason(self):
        is_late = self._hours is not None and time.monotonic() - self._started > 3600 * self._hours
        return self._stop_reason() or (f"Run.max_hours ({self._hours:g})" if is_late else None)

    def impatience(self, step: int, say: Callable[[str], None]) -> Callable[[], bool]:
        """Returns a function that, polled, ends the wait for the batch after a step some seconds after a signal.

        Several processes never stop waiting: the rest would hang in the next collective.
        """
        asked, heard, is_announced = time.monotonic(), None, False

        def gives_up():
            nonlocal heard, is_announced
            now = time.monotonic()
            if not is_announced and now - asked > _BATCH_PATIENCE:
                is_announced = True
                say(_WAITING.format(step, _BATCH_PATIENCE))
            if heard is None and self._is_single and self._stop_reason():
                heard = now
            return heard is not None and now - heard > GRACE

        return gives_up


@contextlib.contextmanager
def at_start() -> Iterator[None]:
    """Gives a Refusal the exit status of an outage if its cause is never the user's mistake."""
    try:
        yield
    except Refusal as refusal:
        classify(refusal, is_running=False)
        raise


def classify(refusal: Refusal, is_running: bool = True) -> None:
    """Sets the exit status of a Refusal by its causes, unless it is set.

    Args:
        is_running: Whether the run has begun, so that its paths were valid.
    """
    if refusal.exit_status != REFUSED:
        return
    causes: list[BaseException] = [refusal]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if is_running and any(isinstance(cause, BrokenCheckpoint) for cause in causes):  # weights that are not finite
        refusal.exit_status = DIVERGED
        return
    for cause in reversed(causes):
        if (outage := is_outage(cause, is_running)) is not None:
            refusal.exit_status = OUTAGE if outage else REFUSED
            return


def is_outage(error: BaseException, is_running: bool) -> bool | None:
    """Returns whether an error may be temporary, from a bucket or disk, or None if undecided.

    `is_running`: See `classify`.
    """
    classes = {one.__name__ for one in type(error).__mro__}
    if isinstance(error, gzip.BadGzipFile):
        return False
    if isinstance(error, OSError):
        return is_running or error.errno in _PASSING
    if "OpError" not in classes:
        return None
    if "UnreachableData: " in str(error):
        return is_running
    if classes & _LASTING_CLASSES or _OF_PYTHON in str(error):
        return False
    return is_running or bool(classes & _PASSING_CLASSES)
