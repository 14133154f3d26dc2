"""Finds the row of a task's source for which a preprocessor fails, because TensorFlow's error names only iterators."""

import bisect
import contextlib
import itertools
import time
from collections.abc import Iterator

import tensorflow as tf

from switch_tf import checks
from switch_tf.data import pipeline
from switch_tf.data.description import DatasetDescription
from switch_tf.data.example_files import BadData
from switch_tf.data.providers import tasks_of
from switch_tf.data.seqio_import import import_seqio
from switch_tf.refusals import first_line, sentence_about_data

_SECONDS = 20  # to look for the row
_CHUNK = 256  # rows that are tried together
_OF_TENSORFLOW_DATA = "Error in user-defined function passed to"


def bad_row(description: DatasetDescription, error: BaseException) -> str | None:
    """Returns the row and the cause of an error of reading data, as half a sentence.

    None if the error is no preprocessor's, or if no row fails by itself among those that are read in 20 seconds.
    """
    if _OF_TENSORFLOW_DATA not in str(error):
        return None
    deadline = time.monotonic() + _SECONDS
    tasks = tasks_of(pipeline.provider_of(description), description.split)
    return next(filter(None, (_bad_row_of(task, description, deadline) for task in tasks)), None)


@contextlib.contextmanager
def refusing_bad_rows(description: DatasetDescription) -> Iterator[None]:
    """Raises a BadData that names the row, or the line of a file, if data cannot be read within this scope."""
    try:
        yield
    except tf.errors.OpError as error:
        if sentence := sentence_about_data(error):
            raise BadData(sentence) from error
        if row := bad_row(description, error):
            raise BadData(f"Data cannot be read: {row}.") from error
        raise


def _bad_row_of(task, description, deadline):
    seqio, rows = import_seqio(), []
    raw = task.source.get_dataset(split=description.split, shuffle=False)

    def read(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=raw.element_spec)

    examples = task.replace(source=seqio.FunctionDataSource(read, splits=[description.split])).get_dataset(
        sequence_length=dict(description.task_feature_lengths), split=description.split, shuffle=False, seed=0,
        num_epochs=1, try_in_mem_cache=False)

    def failure(of_rows):
        rows[:] = of_rows
        try:
            for _ in examples:
                if time.monotonic() > deadline:  # a preprocessor may repeat its rows for ever
                    break
        except tf.errors.OpError as error:
            return first_line(error)
        return None

    count, left = 0, raw.as_numpy_iterator()
    while time.monotonic() < deadline:
        try:
            chunk = list(itertools.islice(left, _CHUNK))
        except tf.errors.OpError as error:
            return (f"the source of task {task.name!r}, split {description.split!r}, after row {count}: "
                    f"{first_line(error)}")
        if not chunk:
            break
        if failure(chunk):
            index = bisect.bisect_left(range(1, len(chunk)), True, key=lambda size: failure(chunk[:size]) is not None)
            cause = failure(chunk[index:index + 1])
            return cause and (f"row {count + index} of task {task.name!r}, split {description.split!r}, "
                              f"{checks.shown(chunk[index])}: {cause}")
        count += len(chunk)
    return None
