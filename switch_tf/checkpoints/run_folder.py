"""The run folder: locked by one process at a time, with files that a crash can only shorten."""

import pathlib
from collections.abc import Iterator

from switch_tf import checks
from switch_tf.checkpoints import folders
from switch_tf.refusals import Outage, Refusal, first_line
from switch_tf.storage import json_lines, leftovers, lock, places
from switch_tf.storage.whole_file import write_whole

LEFT_OUT = "evaluation_left_out"  # in metrics.jsonl, where a signal ended an evaluation
CONFIGURATION = "operative_config.gin"
_FILES = ("metrics.jsonl", "end.json", "report.html", "loss.png", CONFIGURATION)
_FOLDERS = ("events",)
_END = "end.json"
_LOCK = "lock"
_LARGEST_END = 2**20  # bytes
# Limits for a line of metrics.jsonl. The largest perplexity written is exp(700). Axes overflow above 1e308.
_LARGEST_STEP, _LARGEST_VALUE = 2**63 - 1, 1e305


class RunFolder:
    """Creates and locks a run folder. The lock is released when its process ends for any reason.

    Other contents of the folder do not prevent a start, see `leftovers`.

    Args:
        path: path of the folder.
        is_owner: bool. Whether to lock and tidy the folder. One of the processes that train together does.

    Raises:
        Refusal: the folder is no path or cannot be written, or another process trains in it.
    """

    def __init__(self, path: str | pathlib.Path, is_owner: bool = True):
        checks.place("MODEL_DIR", path)
        self.path = places.at(path)
        self.is_owner = is_owner
        self._lock: lock.Lock | None = None
        self._is_new = places.is_local(self.path) and not self.path.exists()
        if not is_owner:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            leftovers.make_room(self.checkpoints, is_folder=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = lock.Lock(self.path, self.path / _LOCK, lock.RUN)
            self._tidy()
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise Refusal(f"MODEL_DIR {str(path)!r} cannot be written ({reason}); choose a folder that can: "
                          "--gin.MODEL_DIR=\"'runs/x'\".") from error

    def _tidy(self):
        leftovers.remove_all(self.path, self.checkpoints)
        folders.remove_unfinished(self.checkpoints)
        for name in _FILES:
            leftovers.make_room(self.path / name)
        for name in _FOLDERS:
            leftovers.make_room(self.path / name, is_folder=True)
        leftovers.make_room(self.checkpoints / "best.json")

    def close(self) -> None:
        """Releases the folder for another process."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Releases the folder. If this process has made it and written nothing, removes it."""
        is_owned = self._lock is not None
        self.close()
        if is_owned and self._is_new and {path.name for path in self.path.rglob("*")} == {_LOCK, self.checkpoints.name}:
            (self.path / _LOCK).unlink()
            self.checkpoints.rmdir()
            self.path.rmdir()

    def check_is_there(self) -> None:
        """Checks that the folder is still the one that this process has locked, if it has locked one.

        Raises:
            Outage: the folder was removed, moved or replaced during the run, or another process took it.
        """
        if self._lock is not None:
            self._lock.check()
            if places.is_local(self.path) and not self.checkpoints.is_dir():
                raise Outage(self._lock.removed())

    @staticmethod
    def checkpoints_of(path: str | pathlib.Path) -> pathlib.Path:
        """Returns the folder of a run folder's checkpoints. Creates and locks nothing."""
        return places.at(path) / "checkpoints"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.checkpoints_of(self.path)

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    def write_configuration(self, text: str) -> None:
        """Replaces the stored configuration by the accepted one, atomically."""
        write_whole(self.path / CONFIGURATION, text)

    def cut_metrics(self, step: int, ends_between: bool = False) -> None:
        """Removes lines after a step, which a resumed run writes again, and lines that are not records.

        Args:
            step: int, the restored step. Its own lines stay.
            ends_between: bool. Whether the step lies between two steps to log. Then its training line goes, because the
                next line averages over its steps too.
        """
        if not self.metrics.exists():
            return
        write_whole(self.metrics, (line.rstrip(b"\r\n") + b"\n" for line, record in records_of(self.metrics)
                                   if record["step"] <= step - (ends_between and "train/loss" in record)))

    def evaluations(self, step: int) -> list[dict]:
        """Returns the records of the evaluations up to a step, oldest first, from `metrics.jsonl`."""
        return [record for _, record in records_of(self.metrics)
                if record["step"] <= step and any(name.startswith("eval/") for name in record)]

    def has_evaluation(self, step: int) -> bool:
        """Returns whether `metrics.jsonl` has an evaluation of a step, or says that it was left out."""
        return any(record["step"] == step and any(name.startswith("eval/") or name == LEFT_OUT for name in record)
                   for _, record in records_of(self.metrics))

    # The reason why the last process in the folder ended.

    def write_end(self, step: int, reason: str) -> None:
        """Records why the run ended. The next start removes the record.

        Raises:
            Refusal: it cannot be written.
        """
        write_whole(self.path / _END, json_lines.dumps({"step": step, "reason": reason}) + "\n")

    def remove_end(self) -> None:
        """Records that the run is in progress again."""
        leftovers.remove(self.path / _END)


def end_of(path: str | pathlib.Path) -> str | None:
    """Returns the reason why the run of a folder ended, or None if it is training or was killed."""
    try:
        end = json_lines.load(places.at(path) / _END, _LARGEST_END)
    except (OSError, ValueError):
        return None
    reason = end.get("reason") if isinstance(end, dict) else None
    return checks.printable(reason) if isinstance(reason, str) else None


def is_running(path: str | pathlib.Path) -> bool:
    """Returns whether a process trains in a run folder. True if that is unknown."""
    return lock.is_held(places.at(path) / _LOCK)


def records_of(path: str | pathlib.Path) -> Iterator[tuple[bytes, dict]]:
    """Yields each line of a `metrics.jsonl` with its record, see `json_lines.read`."""
    return json_lines.read(path, _is_record)


def _is_record(record):
    """Returns whether reports and resumed runs can use a record."""
    step = record.get("step")
    return json_lines.is_step(step) and step <= _LARGEST_STEP and all(
        _is_load(value) if name.endswith("/expert_load") else _is_value(value)
        for name, value in record.items() if name.startswith(("train/", "eval/", "router/")))


def _is_load(value):
    return value is None or isinstance(value, list) and value != [] and all(map(_is_value, value))


def _is_value(value):
    """Returns whether a number can be drawn. None stands for a value that is not finite."""
    return value is None or folders.is_finite(value) and abs(value) <= _LARGEST_VALUE
