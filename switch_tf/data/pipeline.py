"""Batches of seqio's model features, the same in every process and resumable.

TensorFlow's errors name only iterators, so a bad row has to be searched for.
"""

import bisect
import contextlib
import dataclasses
import itertools
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from etils import epy
from tensorflow.python.eager import context as eager_context  # the global seed has no public getter

from switch_tf import checks, context
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.data import cache_files
from switch_tf.data.cache_files import CorruptRecords
from switch_tf.data.example_files import BadData
from switch_tf.data.reading import spell
from switch_tf.data.task_catalog import source_fingerprint
from switch_tf.data.vocabularies import (
    check_split,
    count_passes,
    get_provider,
    import_seqio,
    read_part,
    replace_tasks,
    tasks_of,
)
from switch_tf.refusals import Refusal, first_line, sentence_about_data

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # imports seqio
    from switch_tf.data import cached_tasks


_SECONDS = 20  # to search for a bad row
_CHUNK = 256  # rows tried together
_OF_TENSORFLOW_DATA = "Error in user-defined function passed to"


@dataclasses.dataclass(frozen=True)
class DatasetDescription:
    """A task and the form of its batches.

    Args:
        task_feature_lengths: Tokens of a sequence, for example `{"inputs": 512, "targets": 114}`.
        batch_size: Sequences in the global batch.
        split: "train" is shuffled and repeated forever, any other split is read once, in order.
        seed: Fixes the order and the noise.
        pack: Several examples per sequence, separated by segment ids.
        encoder_only: Features for an encoder without a decoder: inputs in which the vocabulary's last id masks tokens,
            and targets of the same length.
        vocabulary: Name or path that replaces the task's vocabulary, see `get_vocabulary`.
        use_cached_tasks: Read the tokens of `switch-tf cache` instead of text.
        cache_dir: Folder of the cache. None means one for all runs of the user.
        cache_parts: Parts of a training batch that processes read separately. Batches depend on it.
        skip_corrupt_records: Most corrupt records to leave out of each cached task and part.
    """

    mixture_or_task_name: str
    task_feature_lengths: Mapping[str, int]
    batch_size: int
    split: str = "train"
    seed: int = 0
    pack: bool = False
    encoder_only: bool = False
    vocabulary: str | None = None
    use_cached_tasks: bool = False
    cache_dir: str | None = None
    cache_parts: int = 1
    skip_corrupt_records: int = 0

    def __post_init__(self):
        checks.fields(self, ("mixture_or_task_name", "split"), checks.text)
        for name, least in (("batch_size", 1), ("seed", 0), ("cache_parts", 1)):
            object.__setattr__(self, name, checks.integer(name.upper(), getattr(self, name), least))
        checks.fields(self, ("pack", "encoder_only"), checks.flag)
        checks.flag("USE_CACHED_TASKS", self.use_cached_tasks)
        checks.optional("VOCABULARY", self.vocabulary, checks.text)
        checks.optional("CACHE_DIR", self.cache_dir, checks.place)
        checks.integer("Run.skip_corrupt_records", self.skip_corrupt_records, 0)
        if self.is_training and self.batch_size % self.cache_parts:
            raise Refusal(f"CACHE_PARTS must divide BATCH_SIZE ({self.batch_size}), not {self.cache_parts}.")
        lengths = checks.lengths("TASK_FEATURE_LENGTHS", self.task_feature_lengths)
        if self.encoder_only and lengths["inputs"] != lengths["targets"]:
            raise Refusal(
                "An encoder without a decoder predicts one target per input token, so both have the same length, "
                f"received {dict(lengths)}; set targets to {lengths['inputs']}."
            )

    @property
    def is_training(self) -> bool:
        """Whether the split is read repeatedly."""
        return self.split == "train"


def check_description(description: DatasetDescription) -> None:
    """Refuses anything but a DatasetDescription."""
    if not isinstance(description, DatasetDescription):
        raise Refusal(f"description must be a DatasetDescription, not {checks.shown(description)}.")


def description_of_data(run: Run, config: SwitchConfig, split: str, seed: int) -> DatasetDescription:
    """Returns the description of a run's batches."""
    return DatasetDescription(run.mixture_or_task_name, run.task_feature_lengths, run.batch_size, split, seed, run.pack,
                              config.is_encoder_only, run.vocabulary, run.use_cached_tasks, run.cache_dir,
                              run.cache_parts, run.skip_corrupt_records if split == "train" else 0)


@contextlib.contextmanager
def no_global_seed() -> Iterator[None]:
    """Keeps the seed of `tf.random.set_seed` out of this scope's pipelines."""
    state = eager_context.context()
    saved, state._seed = state._seed, None
    try:
        yield
    finally:
        state._seed = saved


@no_global_seed()
def get_dataset(description: DatasetDescription) -> tf.data.Dataset:
    """Returns batches of seqio's model features, the same for the same description in every process.

    The train split is shuffled and repeated forever, with new noise in every epoch. Any other split is read once, in
    order, and its last batch is filled with rows of zeros without loss weights. A mixture ends when all of its tasks
    have ended.

    A `tf.train.Checkpoint(iterator=iter(dataset))` holds the exact position, also for another process.

    Returns: Dataset of `{feature: <int32>[batch_size, length]}`, prefetched.
    """
    check_description(description)
    if description.is_training and description.cache_parts == 1:
        return get_part(description)
    if description.is_training:
        parts = tf.data.Dataset.zip(tuple(get_part(description, index) for index in range(description.cache_parts)))
        return parts.map(lambda *rows: {name: tf.concat([part[name] for part in rows], axis=0) for name in rows[0]})
    provider, batch_size = provider_of(description), description.batch_size

    def fill(batch):
        return {name: tf.ensure_shape(tf.pad(tokens, [[0, batch_size - tf.shape(tokens)[0]], [0, 0]]),
                                      [batch_size, tokens.shape[1]]) for name, tokens in batch.items()}

    batches = _feature_converter(provider, description)(_read_once(provider, description)).batch(batch_size)
    return set_options(batches.map(fill, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


@no_global_seed()
def get_part(description: DatasetDescription, index: int = 0, corrupt: CorruptRecords | None = None) -> tf.data.Dataset:
    """Returns one part of the rows of a training split.

    Args:
        index: Below `cache_parts`. The part has examples and noise of its own, and the rows of a batch from `index *
            batch_size // cache_parts` on.
        corrupt: CorruptRecords of this part. None counts from zero.

    Returns: Dataset of `{feature: <int32>[batch_size // cache_parts, length]}`, prefetched.
    """
    provider, count = provider_of(description, corrupt), description.cache_parts
    converter, part = _feature_converter(provider, description), None
    if count > 1:
        part = import_seqio().ShardInfo(index, count)

    def change(task):
        buffer = task._shuffle_buffer_size and max(1, task._shuffle_buffer_size // count)
        return count_passes(task, description.seed).replace(shuffle_buffer_size=buffer)

    provider = replace_tasks(provider, change)
    with context.within(endless_passes=True):
        examples = provider.get_dataset(**_arguments(description), shuffle=True, num_epochs=None, shard_info=part,
                                        seed=description.seed + index * cache_files.SEEDS_PER_PART)
    batches = converter(examples).batch(description.batch_size // count, drop_remainder=True)
    return set_options(batches.prefetch(tf.data.AUTOTUNE))


def set_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Keeps the order, and turns TensorFlow's tuner off.

    The tuner's thread can miss that its iterator is deleted: the deletion then waits for the thread's next round, up to
    a minute.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return dataset.with_options(options)


def _arguments(description):
    # seqio would keep small tasks in memory, in the first epoch's order, and in every checkpoint of the iterator.
    return {"sequence_length": dict(description.task_feature_lengths), "split": description.split,
            "try_in_mem_cache": False}


def provider_of(description: DatasetDescription, corrupt: CorruptRecords | None = None) -> Any:
    """Returns the task or mixture of a description, reading text or its cache.

    Tasks of a mixture without the split stay unchanged.
    """
    provider = get_provider(description.mixture_or_task_name, description.vocabulary)
    split, cache_dir = description.split, description.cache_dir
    corrupt = corrupt or CorruptRecords(description.skip_corrupt_records)

    def change(task):
        folder = cache_files.folder_of(cache_dir, task.name, split)
        if not folder.exists() and split not in task.splits:
            return task
        place = cache_files.placeholder_of(task)
        source = cached_tasks.CachedSource(split, cache_files.load(task, split, cache_dir), folder, description.seed,
                                           corrupt)
        # seqio counts seeds from the placeholder's index. It stays, so the noise is the same without a cache.
        steps = [lambda dataset: dataset] * place + list(task.preprocessors[place:])
        return task.replace(source=source, preprocessors=steps)

    provider = replace_tasks(provider, change) if description.use_cached_tasks else provider
    check_split(provider, split)
    return provider


def failure(task: "seqio.Task", split: str, error: Exception) -> str:
    """Returns a sentence about an exception, with the line of the user's code."""
    if sentence := sentence_about_data(error):
        return f"Task {task.name!r}, split {split!r}: {sentence}"
    message = first_line(error).rstrip(".")
    if isinstance(error, ValueError | OSError | RuntimeError):
        return f"Task {task.name!r}, split {split!r}: {message}."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if "site-packages" not in frame.filename and os.path.dirname(frame.filename) != os.path.dirname(__file__)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind = "a record has no" if isinstance(error, KeyError) else f"{type(error).__name__}:"
    return f"Task {task.name!r}, split {split!r}, cannot be read ({kind} {message}{place})."


def _feature_converter(provider, description):
    """Returns seqio's converter to the model's features, a function of examples."""
    seqio = import_seqio()
    ranks = {name: feature.rank for name, feature in provider.output_features.items()}
    if not {"inputs", "targets"} <= ranks.keys():
        raise Refusal(f"The model reads inputs and targets, but {provider.name!r} has only {', '.join(ranks)}.")
    if description.pack and set(ranks.values()) != {1}:
        raise Refusal(f"Packing needs features that are sequences of tokens (rank 1), received ranks {ranks}.")
    converter = seqio.EncDecFeatureConverter(pack=description.pack)
    if description.encoder_only:
        mask_id = provider.output_features["inputs"].vocabulary.vocab_size - 1
        converter = seqio.EncoderFeatureConverter(mask_id=mask_id, pack=description.pack)
    return lambda examples: converter(examples, dict(description.task_feature_lengths))


def _read_once(provider, description):
    """Returns all examples once, in order. seqio's mixture would end with its shortest task."""
    arguments = {**_arguments(description), "shuffle": False, "seed": description.seed, "num_epochs": 1}
    if isinstance(provider, import_seqio().Task):
        return set_options(provider.get_dataset(**arguments))
    tasks = tasks_of(provider, description.split)
    return set_options(tf.data.Dataset.sample_from_datasets(
        [provider.get_task_dataset(task, set(provider.output_features), **arguments) for task in tasks],
        [provider.get_rate(task) for task in tasks], description.seed, stop_on_empty_dataset=False))


def fingerprint(description: DatasetDescription) -> dict[str, str]:
    """Returns a hash of each task's cache, or `source_fingerprint`."""
    check_description(description)
    # Earlier versions gave a part every n-th example of a cache, and text had no parts.
    parts = {"parts": "neighbouring examples"} if description.is_training and description.cache_parts > 1 else {}
    if not description.use_cached_tasks:
        return source_fingerprint(description.mixture_or_task_name, description.split) | parts
    return {f"{task.name}: cache": task.source.fingerprint(description.split)
            for task in tasks_of(provider_of(description), description.split)} | parts


def bad_row(description: DatasetDescription, error: BaseException) -> str | None:
    """Returns the row and the cause of a read error, as half a sentence.

    None if no preprocessor raised it, or no row that fails by itself is found in 20 seconds.
    """
    if _OF_TENSORFLOW_DATA not in str(error):
        return None
    deadline = time.monotonic() + _SECONDS
    tasks = tasks_of(provider_of(description), description.split)
    return next(filter(None, (_bad_row_of(task, description, deadline) for task in tasks)), None)


@contextlib.contextmanager
def refusing_bad_rows(description: DatasetDescription) -> Iterator[None]:
    """Turns read errors in this scope into a BadData that names the row or line."""
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

    Training needs a batch from one task, or an example from each task of a mixture, and one for each part. Any other
    split needs one example.
    """
    check_description(description)
    provider, split = provider_of(description), description.split
    tasks, counts = tasks_of(provider, split), {}
    converter = _feature_converter(provider, description)
    # Repeating a line until a batch is full takes minutes. In a mixture, other tasks fill it.
    needed = description.batch_size if description.is_training and len(tasks) == 1 else 1
    # A cache is cut into parts that all have examples.
    num_parts = description.cache_parts if description.is_training and not description.use_cached_tasks else 1
    for task in tasks:
        try:
            counts[task.name] = sum(1 for _ in converter(_read_once(task, description)).take(needed))
            sizes = [sum(1 for _ in read_part(task.source, split, index, num_parts, description.seed).take(1))
                     for index in range(num_parts if num_parts > 1 else 0)]
        except Exception as error:  # any kind, from the user's preprocessors
            row = bad_row(dataclasses.replace(description, mixture_or_task_name=task.name), error)
            raise Refusal(f"Data cannot be read: {row}." if row else failure(task, split, error)) from error
        if 0 in sizes:
            raise Refusal(f"CACHE_PARTS must give each part text to read, and part {sizes.index(0)} of {num_parts} of "
                          f"{task.name!r} has none, because it is made of every {num_parts}th file or example; use "
                          "fewer parts, files of about the same size, or a cache.")
    short = [name for name, count in counts.items() if count < needed]
    if short and (description.is_training or len(short) == len(counts)):
        yields = f"{counts[short[0]]} of the {needed} sequences of a batch" if counts[short[0]] else "no example"
        raise Refusal(
            f"Split {split!r} of {' and '.join(map(repr, short))} yields {yields}, read once: it has too little text "
            f"for {dict(description.task_feature_lengths)}, or a preprocessor drops what there is. Give it more"
            + (", or use a smaller BATCH_SIZE." if needed > 1 else ".")
        )


def _bad_row_of(task, description, deadline):
    rows = []
    raw = task.source.get_dataset(split=description.split, shuffle=False)

    def read(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=raw.element_spec)

    source = import_seqio().FunctionDataSource(read, splits=[description.split])
    examples = _read_once(task.replace(source=source), description)

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
    """Returns the first examples of a split, each `{feature: {"text": str, "ids": list of int}}`."""
    check_description(description)
    checks.integer("count", count, at_least=1)
    provider = get_provider(description.mixture_or_task_name, description.vocabulary)
    try:
        check_split(provider, description.split)
        return [
            {name: {"text": spell(feature.vocabulary, example[name].tolist()), "ids": example[name].tolist()}
             for name, feature in provider.output_features.items() if name in example}
            for example in _read_once(provider, description).take(count).as_numpy_iterator()
        ]
    except Exception as error:  # any kind, from the user's preprocessors
        raise Refusal(failure(provider, description.split, error)) from error


def describe_examples(result: dict) -> str:
    """Returns examples as text and ids to print."""
    lines = [f"{result['name']}, split {result['split']}, at most {result['lengths']} tokens of "
             f"{result['vocabulary_size']}"]
    for number, example in enumerate(result["examples"], 1):
        for feature, shown in example.items():
            lines += [f"{number}. {feature}: {shown['text']}", f"   {' '.join(map(str, shown['ids']))}"]
    return "\n".join(lines)
