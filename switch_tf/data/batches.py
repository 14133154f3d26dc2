"""Training batches of a run.

Each process reads only its own parts of a batch. A part has its own examples and its own noise. Rows and saved
positions belong to parts, so any number of processes resumes with the same rows.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from switch_tf import checks
from switch_tf.data.cache_files import CorruptRecords
from switch_tf.data.pipeline import DatasetDescription, check_description, get_dataset, get_part
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, places

_SAVING_SECONDS = 10  # saving a position waits for prefetched examples
_CLOSING_SECONDS = 5  # waiting for batches under way
_LOOK_PERIOD = 0.1  # seconds
# Suffixes of files that complete a part's position.
_LATER, _CORRUPT = ".later.json", ".corrupt_records"
_LATER_OF_ALL = "data_position_later.json"  # of earlier versions


class AddedFeatures(NamedTuple):
    """Features computed for the rows that this process reads.

    Attributes:
        widths: Name -> width of the feature, <int32>[batch, width].
        of_rows: Function from {name: <int32>[rows, length]} to {name: <int32>[rows, width]}.
    """

    widths: Mapping[str, int]
    of_rows: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

    def added_to(self, batches: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Adds the features to batches, dict of <int32>[..., rows, length]."""
        arrays = {name: np.asarray(value) for name, value in batches.items()}
        before = next(iter(arrays.values())).shape[:-1]
        added = self.of_rows({name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()})
        return {**batches, **{name: tf.constant(added[name].reshape(*before, width), tf.int32)
                              for name, width in self.widths.items()}}

    def specs(self, *before: int) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the features, <int32>[*before, width]."""
        return {name: tf.TensorSpec((*before, width), tf.int32, name=name) for name, width in self.widths.items()}


def get_batches(description: DatasetDescription, steps_per_call: int = 1,
                rows: Sequence[tuple[int, int]] | None = None, added: AddedFeatures | None = None) -> "Batches":
    """Returns the training batches of a description.

    Args:
        rows: Ranges of rows to read, (first, last + 1), or None for all. Other rows may be zeros.
    """
    check_description(description)
    steps_per_call, batch_size = checks.integer("steps_per_call", steps_per_call, 1), description.batch_size

    def calls(batches):
        # The prefetch is part of a saved position: TensorFlow's tuner added it to pipelines of earlier versions.
        return iter(batches.batch(steps_per_call).prefetch(tf.data.AUTOTUNE))

    if description.cache_parts == 1 and not description.use_cached_tasks:
        return Batches({None: calls(get_dataset(description))}, batch_size, steps_per_call=steps_per_call, added=added)
    size = batch_size // description.cache_parts
    parts = sorted({part for first, end in rows or [(0, batch_size)] for part in range(first // size, -(-end // size))})
    corrupt = {index: CorruptRecords(description.skip_corrupt_records) for index in parts}
    return Batches({index: calls(get_part(description, index, corrupt[index])) for index in parts},
                   batch_size, size, steps_per_call, corrupt, added)


class Batches:
    """An iterator over training batches.

    Args:
        parts: Part -> iterator of `{feature: <int32>[steps_per_call, part_size, length]}`. Part None has all rows.
        part_size: Rows of a part.
        steps_per_call: Batches to return at once.
        corrupt: Part -> CorruptRecords.

    Attributes:
        is_stuck: Whether a wait was given up. Its thread may wait for input forever.
    """

    def __init__(self, parts: dict, batch_size: int, part_size: int | None = None, steps_per_call: int = 1,
                 corrupt: dict[int, CorruptRecords] | None = None, added: AddedFeatures | None = None):
        self._corrupt, self._added = corrupt or {index: CorruptRecords() for index in parts}, added
        self._parts, self._batch_size, self._size = parts, batch_size, part_size
        self._steps_per_call = steps_per_call
        self.is_stuck = False
        self._ahead: concurrent.futures.Future | None = None  # the next batches
        self._steps = 0
        # Part -> (last readable position, its step). A position is {suffix: content}, or None at the beginning of the
        # data. Steps before this process are negative.
        self._known: dict = dict.fromkeys(parts, (None, 0))

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Spec of `next`: dict of <int32>[steps_per_call, batch, length]."""
        before = self._steps_per_call, self._batch_size
        read = {name: tf.TensorSpec([*before, *feature.shape[2:]], feature.dtype)
                for name, feature in self._spec_of_part.items()}
        return read | (self._added.specs(*before) if self._added else {})

    def drop_added(self, batches: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns batches without the added features."""
        return {name: batches[name] for name in self._spec_of_part}

    @property
    def _spec_of_part(self):
        return next(iter(self._parts.values())).element_spec

    @property
    def _has_all(self):
        """Whether all rows are read here."""
        return None in self._parts or len(self._parts) * self._size == self._batch_size

    def read_ahead(self) -> None:
        """Starts reading the next batches in a thread, while a training step compiles.

        Until they are taken, `save` writes the position before them.
        """
        self._ahead = self._ahead or _started(self._read)

    def __next__(self) -> dict[str, tf.Tensor]:
        return self.wait(lambda: False)

    def wait(self, gives_up: Callable[[], bool]) -> dict[str, tf.Tensor] | None:
        """Returns the next batches, or None once the polled `gives_up()` is true.

        After None no batches follow, and `save` writes the position after the last returned batches.
        """
        if self.is_stuck:
            return None
        call, self._ahead = self._ahead or _started(self._read), None
        batches = self._result(call, gives_up)
        self._steps += self._steps_per_call * (batches is not None)
        return batches

    def _result(self, call, gives_up):
        while not concurrent.futures.wait([call], _LOOK_PERIOD).done:
            if gives_up():
                self.is_stuck = True
                return None
        return call.result()

    def _read(self):
        read = [next(part) for part in self._parts.values()]
        batches = read[0] if None in self._parts else {
            name: tf.concat([part[name] for part in read], axis=1) for name in read[0]}
        batches = self._added.added_to(batches) if self._added else batches
        if self._has_all:
            return batches
        places = [row for part in self._parts for row in range(part * self._size, (part + 1) * self._size)]
        whole = {name: np.zeros((value.shape[0], self._batch_size, *value.shape[2:]), np.int32)
                 for name, value in batches.items()}
        for name, value in batches.items():
            whole[name][:, places] = value
        return {name: tf.constant(value) for name, value in whole.items()}

    def close(self) -> None:
        """Ends prefetching, because a Python thread at the interpreter's end would abort the process."""
        call, self._ahead = self._ahead, None
        if call:
            due = time.monotonic() + _CLOSING_SECONDS
            with contextlib.suppress(tf.errors.OpError, StopIteration, Refusal):  # these batches are discarded
                self._result(call, lambda: time.monotonic() > due)
        self._parts = {}

    def save(self, folder: pathlib.Path, process_index: int) -> None:
        """Writes the position of the next batch. Each process writes its own parts at the same step.

        TensorFlow cannot save the position of an input that waits for data, and a position after a corrupt record would
        raise its error again. Then this writes the part's previous position and the number of steps since, for
        `restore` to repeat.

        Args:
            process_index: Process 0 writes the position of text without parts.
        """
        # Several processes give up only together, see `training.loop`.
        due = time.monotonic() + (_SAVING_SECONDS if self._has_all else float("inf"))
        names = {index: _name(index, process_index) for index in self._parts if index is not None or process_index == 0}

        def write(folder):
            for index, name in names.items():
                tf.train.Checkpoint(iterator=self._parts[index]).write(str(folder / name))
                if text := self._corrupt[index].text():
                    (folder / name).with_suffix(_CORRUPT).write_text(text)
            return True

        if not self.is_stuck and not self._ahead:
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
                written = pathlib.Path(place)
                if self._result(_started(lambda: write(written)), lambda: time.monotonic() > due):
                    for index, name in names.items():
                        if not self._corrupt[index].has_failed:
                            self._known[index] = _files(written, name), self._steps
        for index, name in names.items():
            files, step = self._known[index]
            for ending, content in (files or {}).items():
                (folder / f"{name}{ending}").write_bytes(content)
            if files is None or step != self._steps:
                later = {"steps": self._steps - step, "is_from_start": files is None}
                (folder / name).with_suffix(_LATER).write_text(json.dumps(later))

    def restore(self, folder: pathlib.Path) -> None:
        """Continues from a saved position, with any number of processes.

        Raises:
            tf.errors.OpError, AssertionError: A file is missing or damaged, or belongs to other data.
        """
        for index, part in self._parts.items():
            # Any process's files will do. A process that never read the part wrote only the steps.
            saved = sorted(folder.glob(f"{_name(index, '*')}.*"))
            place = folder / (saved[0].name.partition(".")[0] if saved else _name(index, 0))
            later = next((file for file in (place.with_suffix(_LATER), folder / _LATER_OF_ALL) if file.exists()), None)
            steps, is_from_start = _parsed(later, lambda entries: (
                int(entries["steps"]), bool(entries["is_from_start"]))) if later else (0, False)
            if not is_from_start:
                literal = places.Literal(place)
                tf.train.Checkpoint(iterator=part).read(str(literal)).assert_existing_objects_matched()
                if (corrupt := place.with_suffix(_CORRUPT)).exists():
                    _parsed(corrupt, self._corrupt[index].take_up)
            for _ in range(steps // self._steps_per_call):
                next(part)
            self._known[index] = None if is_from_start else _files(folder, place.name), self._steps - steps


def _files(folder, name):
    return {file.name.removeprefix(name): file.read_bytes() for file in folder.glob(f"{name}.*")
            if not file.name.endswith(_LATER)}


def _parsed(file, parse):
    try:
        return parse(json_lines.load(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AssertionError(f"{file} is damaged") from error


def _started(function: Callable[[], Any]) -> concurrent.futures.Future:
    """Runs a call that may never return, such as a read from a pipe without a writer, in a thread."""
    call: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            call.set_result(function())
        except BaseException as error:  # raised again in the waiting thread
            call.set_exception(error)

    threading.Thread(target=run, name="patience", daemon=True).start()  # an executor would join it at exit
    return call


def _name(index, process_index):
    return "data_position" if index is None else f"data_position_{index:05d}_{process_index}"
