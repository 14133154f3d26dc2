"""The training batches of a run, one after another, of which a process may read its own rows alone.

Rows of a cached task can be had alone: a batch is made of n parts of equally many rows, each a pipeline of its own,
which reads every n-th example of an epoch and draws its own noise. What is in a row then depends on the seed alone,
neither on the number of processes nor on who reads it; positions are saved part by part, so a run goes on with any
number of processes. Text is read whole by everybody.
"""

import json
import pathlib
import tempfile
import time

import tensorflow as tf

from switch_tf import checks
from switch_tf.data import patience
from switch_tf.data.description import DatasetDescription, check_description
from switch_tf.data.pipeline import get_dataset, get_part

_SAVING_SECONDS = 10  # for the position, which waits for what is being read ahead
_LATER = "data_position_later.json"


def get_batches(description: DatasetDescription, steps_per_call: int = 1,
                rows: tuple[int, int] | None = None) -> "Batches":
    """Returns the training batches of a description.

    Args:
        description: DatasetDescription of a training split.
        steps_per_call: int. So many batches come at once.
        rows: (first, behind the last) of the rows that are wanted, or None for all. Others may be zeros.

    Raises:
        Refusal: as `get_dataset`.
    """
    check_description(description)
    steps_per_call, batch_size = checks.integer("steps_per_call", steps_per_call, 1), description.batch_size
    if not description.use_cached_tasks:
        return Batches({None: iter(get_dataset(description).batch(steps_per_call))}, batch_size,
                       steps_per_call=steps_per_call)
    size = batch_size // description.cache_parts
    first, end = rows or (0, batch_size)
    parts = range(first // size, -(-end // size))
    return Batches({index: iter(get_part(description, index).batch(steps_per_call)) for index in parts}, batch_size,
                   size, steps_per_call)


class Batches:
    """An iterator over training batches.

    Args:
        parts: place of a part -> its iterator, of `{feature: <int32>[steps_per_call, part_size, length]}`; the place is
            None where one iterator has all rows.
        batch_size: int.
        part_size: int, rows of a part.
        steps_per_call: int, batches that come at once.
    """

    def __init__(self, parts: dict, batch_size: int, part_size: int | None = None, steps_per_call: int = 1):
        self._parts, self._batch_size, self._size = parts, batch_size, part_size
        self._steps_per_call = steps_per_call
        self._is_stuck = False
        # Files that hold an earlier position, and the steps since. Where nothing was saved that is the beginning.
        self._known, self._steps_since = {}, 0

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Of what `next` returns: dict of <int32>[steps_per_call, batch, length]."""
        (spec, *_) = (part.element_spec for part in self._parts.values())
        return {name: tf.TensorSpec([feature.shape[0], self._batch_size, *feature.shape[2:]], feature.dtype)
                for name, feature in spec.items()}

    @property
    def is_stuck(self) -> bool:
        """Whether a wait was given up. Its thread still waits for the input, perhaps for ever."""
        return self._is_stuck

    def __next__(self) -> dict[str, tf.Tensor]:
        found = self._read()
        self._steps_since += self._steps_per_call
        return found

    def wait(self, gives_up) -> dict[str, tf.Tensor] | None:
        """Returns the next batches, or None if `gives_up()`, which is called now and then, becomes true first.

        After None there are no more batches, and `save` writes the position after the last ones that were returned.
        """
        found = self._patiently(self._read, gives_up)
        self._steps_since += self._steps_per_call * (found is not None)
        return found

    def _patiently(self, function, gives_up):
        """Calls a function that uses the input; returns None if the input is stuck or the wait is given up."""
        try:
            return None if self._is_stuck else patience.call(function, gives_up)
        except patience.GivenUp:
            self._is_stuck = True
            return None

    def _read(self):
        read = [next(part) for part in self._parts.values()]
        if None in self._parts:
            return read[0]
        before = min(self._parts) * self._size
        behind = self._batch_size - before - len(read) * self._size
        return {name: tf.pad(tf.concat([part[name] for part in read], axis=1), [[0, 0], [before, behind], [0, 0]])
                for name in read[0]}

    def close(self) -> None:
        """Ends what reads ahead: a thread that is within Python when the interpreter ends would abort the process."""
        self._parts = {}

    def save(self, folder: pathlib.Path, process_index: int) -> None:
        """Writes where the next batch comes from; every process its own parts, of the same step.

        TensorFlow has no position of an input that is waiting for data. Then the one before it is written again, with
        the number of steps since, which `restore` reads once more.

        Args:
            folder: of a checkpoint.
            process_index: int. What all processes read is written by the first.
        """
        # A part of another process cannot be read once more from here.
        has_all = None in self._parts or len(self._parts) * self._size == self._batch_size
        due = time.monotonic() + (_SAVING_SECONDS if has_all else float("inf"))
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
            if self._patiently(lambda: self._write(pathlib.Path(place), process_index), lambda: time.monotonic() > due):
                self._keep(pathlib.Path(place).iterdir(), 0)
        for name, content in self._known.items():
            (folder / name).write_bytes(content)
        if self._steps_since:
            (folder / _LATER).write_text(json.dumps({"steps": self._steps_since, "is_from_start": not self._known}))

    def _write(self, folder, process_index):
        for index, part in self._parts.items():
            if index is not None or process_index == 0:
                tf.train.Checkpoint(iterator=part).write(str(folder / _name(index, process_index)))
        return True

    def _keep(self, files, steps_since):
        self._known = {file.name: file.read_bytes() for file in files}
        self._steps_since = steps_since

    def restore(self, folder: pathlib.Path) -> None:
        """Goes on where another one was saved, by whichever processes.

        Raises:
            tf.errors.OpError, AssertionError: a file is missing or damaged, or is of other data.
        """
        later = folder / _LATER
        steps, is_from_start = _read_later(later) if later.exists() else (0, False)
        if not is_from_start:
            self._restore(folder)
        for _ in range(steps // self._steps_per_call):
            next(self)
        self._keep([file for file in folder.glob("data_position*") if file != later], steps)

    def _restore(self, folder):
        for index, part in self._parts.items():
            saved = sorted(folder.glob(_name(index, "*") + ".index"))
            name = saved[0].with_suffix("") if saved else folder / _name(index, 0)
            tf.train.Checkpoint(iterator=part).read(str(name)).assert_existing_objects_matched()


def _read_later(file):
    try:
        found = json.loads(file.read_text())
        return int(found["steps"]), bool(found["is_from_start"])
    except (ValueError, KeyError, TypeError) as error:
        raise AssertionError(f"{file} is damaged") from error


def _name(index, process_index):
    return "data_position" if index is None else f"data_position_{index:05d}_{process_index}"
