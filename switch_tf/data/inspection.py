"""Looks at data before and beside training: too few examples, rows at fault, and the first examples as text.

TensorFlow's errors name only iterators, so the row at fault has to be found.
"""

import bisect
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator

import tensorflow as tf

from switch_tf import checks
from switch_tf.data.example_files import BadData
from switch_tf.data.pipeline import (
    DatasetDescription,
    arguments_of,
    check_description,
    failure,
    feature_converter,
    no_global_seed,
    provider_of,
    read_once,
)
from switch_tf.data.providers import check_split, get_provider, tasks_of
from switch_tf.data.spelling import spell
from switch_tf.data.vocabularies import import_seqio
from switch_tf.refusals import Refusal, first_line, sentence_about_data

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
    tasks = tasks_of(provider_of(description), description.split)
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


@no_global_seed()
def check_examples(description: DatasetDescription) -> None:
    """Refuses data with too few examples, because seqio would read an empty training split forever.

    Reads each task in order from its beginning.

    Raises:
        Refusal: A task to train on yields less than a batch, a task of a mixture no example, or no task of another
            split any example.
    """
    check_description(description)
    provider, split = provider_of(description), description.split
    tasks, counts = tasks_of(provider, split), {}
    converter, lengths = feature_converter(provider, description), dict(description.task_feature_lengths)
    # Repeating a line until a batch is full takes minutes. In a mixture, the other tasks fill it.
    needed = description.batch_size if description.is_training and len(tasks) == 1 else 1
    for task in tasks:
        try:
            counts[task.name] = sum(1 for _ in converter(_in_order(task, description), lengths).take(needed))
        except Exception as error:  # from preprocessors of the user, of any kind
            row = bad_row(dataclasses.replace(description, mixture_or_task_name=task.name), error)
            raise Refusal(f"Data cannot be read: {row}." if row else failure(task, split, error)) from error
    short = [name for name, count in counts.items() if count < needed]
    if short and (description.is_training or len(short) == len(counts)):
        yields = f"{counts[short[0]]} of the {needed} sequences of a batch" if counts[short[0]] else "no example"
        raise Refusal(
            f"Split {split!r} of {' and '.join(map(repr, short))} yields {yields}, read once: it has too little text "
            f"for {lengths}, or a preprocessor drops what there is. Give it more"
            + (", or use a smaller BATCH_SIZE." if needed > 1 else ".")
        )


def _in_order(task, description):
    return task.get_dataset(**arguments_of(description), seed=0, num_epochs=1)


def _bad_row_of(task, description, deadline):
    seqio, rows = import_seqio(), []
    raw = task.source.get_dataset(split=description.split, shuffle=False)

    def read(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=raw.element_spec)

    examples = _in_order(task.replace(source=seqio.FunctionDataSource(read, splits=[description.split])), description)

    def error_of(some):
        rows[:] = some
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
        if error_of(chunk):
            index = bisect.bisect_left(range(1, len(chunk)), True, key=lambda size: error_of(chunk[:size]) is not None)
            cause = error_of(chunk[index:index + 1])
            return cause and (f"row {count + index} of task {task.name!r}, split {description.split!r}, "
                              f"{checks.shown(chunk[index])}: {cause}")
        count += len(chunk)
    return None


@no_global_seed()
def examples(description: DatasetDescription, count: int) -> list[dict[str, dict]]:
    """Returns the first examples of a split, in order, each `{feature: {"text": str, "ids": list of int}}`.

    Args:
        description: DatasetDescription. Its batch size and packing do not matter.
        count: int. Largest number of examples.

    Raises:
        Refusal: The name or split is unknown, or the data are missing or cannot be read.
    """
    check_description(description)
    checks.integer("count", count, at_least=1)
    provider = get_provider(description.mixture_or_task_name, description.vocabulary)
    try:
        check_split(provider, description.split)
        return [
            {name: {"text": spell(feature.vocabulary, example[name].tolist()), "ids": example[name].tolist()}
             for name, feature in provider.output_features.items() if name in example}
            for example in read_once(provider, description).take(count).as_numpy_iterator()
        ]
    except Exception as error:  # from preprocessors of the user, of any kind
        raise Refusal(failure(provider, description.split, error)) from error


def describe(result: dict) -> str:
    """Returns examples as text and ids, from their task's `name`, `split`, `lengths`, `vocabulary_size`, `examples`."""
    lines = [f"{result['name']}, split {result['split']}, at most {result['lengths']} tokens of "
             f"{result['vocabulary_size']}"]
    for number, example in enumerate(result["examples"], 1):
        for feature, shown in example.items():
            lines += [f"{number}. {feature}: {shown['text']}", f"   {' '.join(map(str, shown['ids']))}"]
    return "\n".join(lines)
