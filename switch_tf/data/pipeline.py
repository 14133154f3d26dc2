"""Batches of seqio's model features for a description: the same in every process, and resumable."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from etils import epy
from tensorflow.python.eager import context as eager_context  # the global seed has no public getter

from switch_tf import context
from switch_tf.data.corrupt_records import CorruptRecords
from switch_tf.data.description import FEATURES, DatasetDescription, check_description
from switch_tf.data.endless import with_counted_passes
from switch_tf.data.providers import check_split, get_provider, replace_tasks, tasks_of
from switch_tf.data.seqio_import import import_seqio
from switch_tf.refusals import Refusal, first_line, sentence_about_data

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # imports seqio
    from switch_tf.data import cached_tasks

_SEEDS_PER_PART = 1_000_003  # because seqio counts up from the seed of a part, and users from theirs


@contextlib.contextmanager
def no_global_seed() -> Iterator[None]:
    """Keeps the seed of `tf.random.set_seed`, which TensorFlow mixes in, out of pipelines made within this scope."""
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
    order. Each of its examples counts once, and the last batch is filled with rows of zeros, which have no targets and
    no loss weights. A mixture ends when all of its tasks have ended.

    A `tf.train.Checkpoint(iterator=iter(dataset))` holds the exact position. Restored in another process, the iterator
    continues with the same next batch.

    Args:
        description: DatasetDescription.

    Returns: tf.data.Dataset of `{feature: <int32>[batch_size, length]}`, prefetched.

    Raises:
        Refusal: The name or the split is unknown, or the task cannot use the lengths, or the model the features.
    """
    check_description(description)
    if description.use_cached_tasks and description.is_training:
        parts = tf.data.Dataset.zip(tuple(get_part(description, index) for index in range(description.cache_parts)))
        return parts.map(lambda *rows: {name: tf.concat([part[name] for part in rows], axis=0) for name in rows[0]})
    provider, converter, arguments = _checked(description)
    lengths, batch_size = dict(description.task_feature_lengths), description.batch_size
    if description.is_training:
        with context.within(endless_passes=True):
            examples = provider.get_dataset(**arguments, seed=description.seed, num_epochs=None)
        batches = converter(examples, lengths).batch(batch_size, drop_remainder=True)
    else:
        examples = read_once(provider, {**arguments, "seed": description.seed})
        batches = converter(examples, lengths).batch(batch_size)
        batches = batches.map(lambda batch: _fill_rows(batch, batch_size), num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE).with_options(_in_order())


@no_global_seed()
def get_part(description: DatasetDescription, index: int, corrupt: CorruptRecords | None = None) -> tf.data.Dataset:
    """Returns one part of the rows of a cached training split: every n-th example, with separate noise.

    Args:
        description: DatasetDescription with `use_cached_tasks`.
        index: int below `cache_parts`. The first row is `index * batch_size // cache_parts`.
        corrupt: CorruptRecords of this part. None counts from zero.

    Returns: tf.data.Dataset of `{feature: <int32>[batch_size // cache_parts, length]}`, prefetched.
    """
    provider, converter, arguments = _checked(description, corrupt)
    count = description.cache_parts
    with context.within(endless_passes=True):
        examples = provider.get_dataset(**arguments, seed=description.seed + index * _SEEDS_PER_PART, num_epochs=None,
                                        shard_info=import_seqio().ShardInfo(index, count))
    rows = converter(examples, dict(description.task_feature_lengths)).batch(description.batch_size // count,
                                                                             drop_remainder=True)
    return rows.prefetch(tf.data.AUTOTUNE).with_options(_in_order())


def _checked(description, corrupt=None):
    """Returns the task or mixture of a description, its feature converter and the arguments of seqio's reading."""
    provider = provider_of(description, corrupt)
    check_split(provider, description.split)
    if description.is_training:
        provider = replace_tasks(provider, with_counted_passes)
    arguments = {
        "sequence_length": dict(description.task_feature_lengths), "split": description.split,
        "shuffle": description.is_training,
        # Otherwise seqio keeps the examples of small tasks in memory, in the order of the first epoch, and writes all
        # of them into every checkpoint of the iterator.
        "try_in_mem_cache": False,
    }  # fmt: skip
    return provider, feature_converter(provider, description), arguments


def _in_order():
    options = tf.data.Options()
    options.deterministic = True
    return options


def provider_of(description: DatasetDescription, corrupt: CorruptRecords | None = None) -> Any:
    """Returns the task or mixture of a description, which reads text or its cache."""
    name, vocabulary = description.mixture_or_task_name, description.vocabulary
    if not description.use_cached_tasks:
        return get_provider(name, vocabulary)
    return cached_tasks.get_cached_provider(name, vocabulary, description.cache_dir, description.split,
                                            description.seed, description.cache_parts,
                                            corrupt or CorruptRecords(description.skip_corrupt_records))


def failure(task: "seqio.Task", split: str, error: Exception) -> str:
    """Returns a sentence about an exception, with the line of the user's code that raised it."""
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


def feature_converter(provider: "seqio.Task | seqio.Mixture", description: DatasetDescription) -> Any:
    """Returns seqio's converter of examples to the features of the model."""
    seqio = import_seqio()
    ranks = {name: feature.rank for name, feature in provider.output_features.items()}
    if not set(FEATURES) <= set(ranks):
        raise Refusal(f"The model reads inputs and targets, but {provider.name!r} has only {', '.join(ranks)}.")
    if description.pack and set(ranks.values()) != {1}:
        raise Refusal(f"Packing needs features that are sequences of tokens (rank 1), received ranks {ranks}.")
    if description.encoder_only:
        mask_id = provider.output_features["inputs"].vocabulary.vocab_size - 1
        return seqio.EncoderFeatureConverter(mask_id=mask_id, pack=description.pack)
    return seqio.EncDecFeatureConverter(pack=description.pack)


def read_once(provider: "seqio.Task | seqio.Mixture", arguments: dict[str, Any]) -> tf.data.Dataset:
    """Returns all examples of a split once. seqio's mixture would end with its shortest task."""
    seqio = import_seqio()
    if isinstance(provider, seqio.Task):
        return provider.get_dataset(**arguments, num_epochs=1)
    tasks = tasks_of(provider, arguments["split"])
    features = set(provider.output_features)
    datasets = [provider.get_task_dataset(task, features, **arguments, num_epochs=1) for task in tasks]
    rates = [provider.get_rate(task) for task in tasks]
    return tf.data.Dataset.sample_from_datasets(datasets, rates, arguments["seed"], stop_on_empty_dataset=False)


def _fill_rows(batch, batch_size):
    """Fills a batch with rows of zeros up to `batch_size`."""
    filled = {}
    for name, tokens in batch.items():
        missing = batch_size - tf.shape(tokens)[0]
        filled[name] = tf.ensure_shape(tf.pad(tokens, [[0, missing], [0, 0]]), [batch_size, tokens.shape[1]])
    return filled
