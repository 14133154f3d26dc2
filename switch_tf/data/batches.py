"""The training batches of a run, one after another, of which a process may read its own rows alone.

Rows of a cached task can be had alone: a batch is made of n parts of equally many rows, each a pipeline of its own,
which reads every n-th example of an epoch and draws its own noise. What is in a row then depends on the seed alone,
neither on the number of processes nor on who reads it; positions are saved part by part, so a run goes on with any
number of processes. Text is read whole by everybody.
"""

import pathlib

import tensorflow as tf

from switch_tf import checks
from switch_tf.data.description import DatasetDescription, check_description
from switch_tf.data.pipeline import get_dataset, get_part


def get_batches(description: DatasetDescription, steps_per_call: int = 1,
                rows: tuple[int, int] | None = None) -> "Batches":
    """Returns the training batches of a description.

    Args:
        description: DatasetDescription of a training split.
        steps_per_call: int. So many batches come at once.
        rows: (first, behind the last) of the rows that are wanted, or None for all. Others may be zeros.

    Raises:
        ValueError: as `get_dataset`.
    """
    check_description(description)
    steps_per_call, batch_size = checks.integer("steps_per_call", steps_per_call, 1), description.batch_size
    if not description.use_cached_tasks:
        return Batches({None: iter(get_dataset(description).batch(steps_per_call))}, batch_size)
    size = batch_size // description.cache_parts
    first, end = rows or (0, batch_size)
    parts = range(first // size, -(-end // size))
    return Batches({index: iter(get_part(description, index).batch(steps_per_call)) for index in parts}, batch_size,
                   size)


class Batches:
    """An iterator over training batches.

    Args:
        parts: place of a part -> its iterator, of `{feature: <int32>[steps_per_call, part_size, length]}`; the place is
            None where one iterator has all rows.
        batch_size: int.
        part_size: int, rows of a part.
    """

    def __init__(self, parts: dict, batch_size: int, part_size: int | None = None):
        self._parts, self._batch_size, self._size = parts, batch_size, part_size

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Of what `next` returns: dict of <int32>[steps_per_call, batch, length]."""
        (spec, *_) = (part.element_spec for part in self._parts.values())
        return {name: tf.TensorSpec([feature.shape[0], self._batch_size, *feature.shape[2:]], feature.dtype)
                for name, feature in spec.items()}

    def __next__(self) -> dict[str, tf.Tensor]:
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

        Args:
            folder: of a checkpoint.
            process_index: int. What all processes read is written by the first.
        """
        for index, part in self._parts.items():
            if index is not None or process_index == 0:
                tf.train.Checkpoint(iterator=part).write(str(folder / _name(index, process_index)))

    def restore(self, folder: pathlib.Path) -> None:
        """Goes on where another one was saved, by whichever processes.

        Raises:
            tf.errors.OpError, AssertionError: a file is missing or damaged, or is of other data.
        """
        for index, part in self._parts.items():
            saved = sorted(folder.glob(_name(index, "*") + ".index"))
            name = saved[0].with_suffix("") if saved else folder / _name(index, 0)
            tf.train.Checkpoint(iterator=part).read(str(name)).assert_existing_objects_matched()


def _name(index, process_index):
    return "data_position" if index is None else f"data_position_{index:05d}_{process_index}"
