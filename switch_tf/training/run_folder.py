"""The run folder: one process at a time, and files that a crash can only shorten."""

import fcntl
import json
import os
import pathlib

from switch_tf.whole_file import write_whole

CONFIGURATION = "operative_config.gin"


class RunFolder:
    """Creates and locks a run folder. The lock dies with the process that holds it, however that ends.

    Args:
        path: the folder.
        is_owner: bool. Only one of the processes that train together takes the lock and tidies up.

    Raises:
        ValueError: the folder is a URL or cannot be written, or another process trains in it.
    """

    def __init__(self, path, is_owner=True):
        if "://" in str(path):
            raise ValueError("MODEL_DIR must be a folder of this machine's file system (a mounted bucket will do), not "
                             f"{str(path)!r}: runs are locked and renamed into place there.")
        self.path = pathlib.Path(path)
        self._lock = None
        if not is_owner:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a+")  # noqa: SIM115  held until the process ends
        except OSError as error:
            raise ValueError(f"MODEL_DIR {str(path)!r} cannot be written ({error.strerror}); choose a folder that can: "
                             "--gin.MODEL_DIR=\"'runs/x'\".") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            raise ValueError(f"Another process (pid {owner}) is training in {str(path)!r}; wait for it, stop it, or "
                             "choose another MODEL_DIR.") from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        for unfinished in self.checkpoints.glob("tmp.*"):
            for file in unfinished.iterdir():
                file.unlink()
            unfinished.rmdir()

    def close(self) -> None:
        """Lets another process have the folder."""
        if self._lock is not None:
            self._lock.close()

    @staticmethod
    def checkpoints_of(path) -> pathlib.Path:
        """Where the run folder of that path keeps its checkpoints; nothing is created or locked."""
        return pathlib.Path(path) / "checkpoints"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.checkpoints_of(self.path)

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    def write_configuration(self, text: str) -> None:
        """Puts the configuration that was accepted in the place of the one before it, at once."""
        write_whole(self.path / CONFIGURATION, text)

    def cut_metrics(self, step: int, ends_between=False) -> None:
        """Drops the lines past a step, and a torn last line; a resumed run writes them again.

        An evaluation of the restored step itself was made before the step was left, and stays. A training line of it
        stays too, but where the run `ends_between` two steps to log: that run's last line is in the next one's mean.
        """
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text().splitlines():
            try:
                record = json.loads(line)
                is_kept = record["step"] <= step - (ends_between and "train/loss" in record)
            except (json.JSONDecodeError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                kept.append(line)
        write_whole(self.metrics, "".join(line + "\n" for line in kept))
