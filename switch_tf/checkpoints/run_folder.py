"""The run folder: locked by one process at a time, with files that a crash can only shorten."""

import collections
import time
from collections.abc import Iterable, Iterator
from typing import Any

from switch_tf import checks
from switch_tf.checkpoints import folders
from switch_tf.refusals import Outage, Refusal, first_line
from switch_tf.storage import json_lines, leftovers, lock, outputs, places
from switch_tf.storage.whole_file import write_whole

LEFT_OUT = "evaluation_left_out"  # in metrics.jsonl, for an evaluation that a signal ended
SECONDS = "seconds/"  # in metrics.jsonl, before the causes of `speed.Clock`
REDONE = SECONDS + "redone"  # seconds of steps that a resumed run takes again
CONFIGURATION = "operative_config.gin"
_END = "end.json"
_FILES = ("metrics.jsonl", _END, "report.html", "loss.png", CONFIGURATION)
_LOCK = "lock"
# Limits for a line of metrics.jsonl. The largest perplexity written is exp(700). Axes overflow above 1e308.
_LARGEST_STEP, _LARGEST_VALUE = 2**63 - 1, 1e305
_POLL_SECONDS = 5
# A preempted machine is back within minutes.
_RESTART_SECONDS = 900


class RunFolder:
    """Creates and locks a run folder. The lock ends with its process.

    Args:
        is_owner: Whether to lock and tidy the folder, as one of several processes does.
    """

    def __init__(self, path: folders.Folder, is_owner: bool = True):
        self.path = checks.path("MODEL_DIR", path)
        self.checkpoints, self.metrics = folders.checkpoints_of(self.path), self.path / "metrics.jsonl"
        self.is_owner = is_owner
        self._lock = None
        self._is_new = places.is_local(self.path) and not self.path.exists()
        if not is_owner:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            leftovers.make_room(self.checkpoints, is_folder=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = lock.Lock(self.path, self.path / _LOCK)
            for folder in (self.path, self.checkpoints):
                leftovers.remove_unfinished(folder)
            folders.remove_unfinished(self.checkpoints)
            for name in (*_FILES, "checkpoints/best.json"):
                leftovers.make_room(self.path / name)
            leftovers.make_room(self.path / "events", is_folder=True)
        except OSError as error:
            raise Refusal(f"MODEL_DIR {str(path)!r} cannot be written ({error.strerror or first_line(error)}); choose "
                          "a folder that can: --gin.MODEL_DIR=\"'runs/x'\".") from error

    def close(self) -> None:
        """Releases the folder for another process."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Releases the folder, and removes it if this process created it and it is empty."""
        is_owned = self._lock is not None
        self.close()
        if is_owned and self._is_new and {path.name for path in self.path.rglob("*")} == {_LOCK, self.checkpoints.name}:
            (self.path / _LOCK).unlink()
            self.checkpoints.rmdir()
            self.path.rmdir()

    def check_is_there(self) -> None:
        """Checks that a folder locked by this process is still the same.

        Raises:
            Outage: The folder was removed, moved or replaced, or another process took it.
        """
        if self._lock is not None:
            self._lock.check()
            if places.is_local(self.path) and not self.checkpoints.is_dir():
                raise Outage(self._lock.removed())

    def cut_metrics(self, step: int, ends_between: bool = False) -> None:
        """Removes invalid lines, and lines that a run resumed at a step writes again.

        Their seconds stay in a line of their own, as redone if they are of later steps.

        Args:
            step: The restored step. Its own lines stay.
            ends_between: Whether the step lies between two logged steps. Its training line goes, because the next line
                includes its steps.
        """
        def lines():
            seconds = collections.Counter[str]()
            for line, record in records_of(self.metrics):
                if record["step"] <= step - (ends_between and "train/loss" in record):
                    yield line.rstrip(b"\r\n") + b"\n"
                    continue
                for name, value in record.items():
                    if name.startswith(SECONDS):
                        seconds[name if record["step"] <= max(step, 0) else REDONE] += value or 0
            if seconds:
                yield json_lines.dumps({"step": max(step, 0), **seconds}).encode() + b"\n"

        if self.metrics.exists():
            write_whole(self.metrics, lines())

    def evaluations(self, step: int) -> list[dict]:
        """Returns the records of evaluations up to a step, skipped ones included."""
        return [record for _, record in records_of(self.metrics)
                if record["step"] <= step and any(name.startswith(("eval/", LEFT_OUT)) for name in record)]

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation of a step, or its omission, is recorded."""
        return any(record["step"] == step for record in self.evaluations(step))

    def write_end(self, step: int, reason: str) -> None:
        """Records why the run ended. The next start removes the record."""
        write_whole(self.path / _END, json_lines.dumps({"step": step, "reason": reason}) + "\n")

    def remove_end(self) -> None:
        """Removes the record of the end."""
        leftovers.remove(self.path / _END)


def end_of(path: Any) -> str | None:
    """Returns why the run of a folder ended, or None if it is training or was killed."""
    try:
        end = json_lines.load(path / _END)
    except (OSError, ValueError):
        return None
    reason = end.get("reason") if isinstance(end, dict) else None
    return checks.printable(reason) if isinstance(reason, str) else None


def is_running(path: Any) -> bool:
    """Whether a process trains in a run folder. True if unknown."""
    return lock.is_held(path / _LOCK)


def records_of(path: Any) -> Iterator[tuple[bytes, dict]]:
    """Yields each line of a `metrics.jsonl` with its record, see `json_lines.read`."""
    return json_lines.read(path, _is_record)


def _is_record(record):
    step = record.get("step")
    return json_lines.is_step(step) and step <= _LARGEST_STEP and all(
        value is None or isinstance(value, list) and value != [] and all(map(_is_value, value))
        if name.endswith("/expert_load") else _is_value(value)
        for name, value in record.items() if name.startswith(("train/", "eval/", "router/", SECONDS)))


def _is_value(value):
    """None stands for a value that is not finite."""
    return value is None or folders.is_finite(value) and abs(value) <= _LARGEST_VALUE


def select(run_folder: folders.Folder, step: str, hint: str = "") -> list[Any]:
    """Returns checkpoint folders of a run, oldest first.

    Args:
        step: A step, "best", "last" or "all".
        hint: End of the message for a run without checkpoints.
    """
    checkpoints = folders.checkpoints_of(run_folder)
    saved = folders.steps(checkpoints)
    if not saved:
        raise Refusal(f"The run folder {str(run_folder)!r} has no checkpoint yet; train it first{hint}.")
    if step == "all":
        selected = saved
    elif step == "last":
        selected = saved[-1:]
    elif step == "best":
        best = folders.best(checkpoints)
        if best is None:
            raise Refusal(f"The run in {str(run_folder)!r} keeps no best checkpoint; give --step=last, or train it "
                          "with --gin.BEST_METRIC=\"'eval/<task>/<metric>'\".")
        selected = [best["step"]]
    elif step.isdecimal() and int(step) in saved:
        selected = [int(step)]
    else:
        raise Refusal(f"--step must be best, last, all or a step with a checkpoint ({', '.join(map(str, saved))}), "
                      f"not {step!r}.")
    return [folders.path_of(checkpoints, step) for step in selected]


def select_one(run_folder: folders.Folder, step: str) -> Any:
    """Returns one checkpoint folder, see `select`."""
    if step == "all":
        raise Refusal("--step must be best, last or a step: one checkpoint answers, not 'all'.")
    return select(run_folder, step)[0]


def follow(folder: Any, last_step: int, done: Iterable[int] = ()) -> Iterator[Any]:
    """Yields each new checkpoint of a run until the run ends, oldest first.

    A killed run records no end and may be restarted, so this waits some minutes. A run restarted with a larger
    TRAIN_STEPS is followed further.

    Args:
        last_step: Last step, as configured when the command started.
        done: Steps to leave out.
    """
    checkpoints, done = folders.checkpoints_of(folder), set(done)
    is_announced, killed_at = False, None
    while True:
        # Read first: a run writes its last checkpoint, then its end, and then releases its lock.
        end, is_alive = end_of(folder), is_running(folder)
        new = [step for step in folders.steps(checkpoints) if step not in done]
        if new:
            is_announced, killed_at = False, None  # the run was alive, so the wait starts again
            done.add(new[0])
            yield folders.path_of(checkpoints, new[0])
            continue
        is_complete = bool(done) and max(done) >= last_step
        if is_complete and (end is not None or not is_alive):
            return
        if end is not None and not is_alive:
            outputs.say(f"The run has ended ({end.rstrip('.')}); all of its checkpoints that were found are "
                           "evaluated.")
            return
        killed_at = None if is_alive else killed_at or time.monotonic()
        if killed_at and time.monotonic() - killed_at > _RESTART_SECONDS:
            outputs.say(f"No process has trained in {folder} for {_RESTART_SECONDS // 60} minutes, and the run did "
                           "not record why it ended, as after a kill. Start the run and this command again.")
            return
        if not is_announced and not is_complete:
            outputs.say(f"Waiting for a checkpoint after step {max(done, default=0)} of {last_step}; Ctrl-C ends "
                           "this." + (" No process trains there now; in case the run was killed and is started again, "
                                      f"this waits {_RESTART_SECONDS // 60} minutes." if killed_at else ""))
        is_announced = True
        time.sleep(_POLL_SECONDS)
