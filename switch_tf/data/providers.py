"""seqio tasks and mixtures by name, with other vocabularies, and in another order in each pass."""

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from switch_tf import checks, context
from switch_tf.configs import names
from switch_tf.configs.choices import nearest
from switch_tf.data.vocabularies import get_vocabulary, import_seqio
from switch_tf.refusals import Refusal

if TYPE_CHECKING:
    import seqio


def vocabulary_size(mixture_or_task_name: str, vocabulary: str | None = None) -> int:
    """Returns the number of ids of a task's or mixture's vocabulary, sentinels included.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        vocabulary: str or None, see `get_provider`.

    Raises:
        Refusal: The name is unknown, or the vocabulary cannot be read.
    """
    vocabularies = vocabularies_of(get_provider(mixture_or_task_name, vocabulary))
    try:
        return max(vocabulary.vocab_size for vocabulary in vocabularies)
    except Exception as error:  # of SentencePiece, protobuf or TensorFlow
        paths = {str(getattr(vocabulary, "sentencepiece_model_file", "")) for vocabulary in vocabularies}
        raise Refusal(
            f"The vocabulary of {mixture_or_task_name!r}, {', '.join(sorted(paths))}, cannot be read "
            f"({type(error).__name__}); it has to be a SentencePiece model, and a gs:// path needs network access to "
            "Google Cloud Storage."
        ) from error


def vocabularies_of(provider: "seqio.Task | seqio.Mixture") -> list:
    """Returns the vocabularies of the features of a task or mixture."""
    return [feature.vocabulary for feature in provider.output_features.values()]


def target_vocabulary(mixture_or_task_name: str, vocabulary: str | None = None) -> "seqio.Vocabulary":
    """Returns the seqio vocabulary of the targets of a task or mixture; `vocabulary` as for `get_provider`."""
    return get_provider(mixture_or_task_name, vocabulary).output_features["targets"].vocabulary


def tasks_of(provider: "seqio.Task | seqio.Mixture", split: str) -> list:
    """Returns the tasks that have a split: the task itself, or some tasks of a mixture. Refuses an unknown split."""
    check_split(provider, split)
    return [task for task in getattr(provider, "tasks", [provider]) if split in task.splits]


def check_vocabulary(mixture_or_task_name: str, vocab_size: int, vocabulary: str | None = None) -> None:
    """Refuses a model without an embedding for every token of the task.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        vocab_size: int. Rows of the model's embedding.
        vocabulary: str or None, see `get_provider`.

    Raises:
        Refusal: The vocabulary is larger, or cannot be read.
    """
    checks.integer("vocab_size", vocab_size, at_least=1)
    needed = vocabulary_size(mixture_or_task_name, vocabulary)
    if vocab_size < needed:
        chosen = f" with VOCABULARY {vocabulary!r}" if vocabulary else ""
        raise Refusal(
            f"The model has vocab_size {vocab_size}, but {mixture_or_task_name!r}{chosen} has token ids up to "
            f"{needed - 1}; set SwitchConfig.vocab_size to at least {needed}, or choose a smaller vocabulary."
        )


def check_task(name: str) -> None:
    """Refuses a name that no task and no mixture has; registers a declared task.

    Raises:
        Refusal: The sentence has the nearest name; or the task needs a package that is not installed.
    """
    names.check_task(name)
    names.register_task(name)
    seqio = import_seqio()
    known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in known:
        mixture = name.partition(".")[0]
        members = [other for other in sorted(known) if other.startswith(f"{mixture}.")]
        raise Refusal(f"No task or mixture is called {name!r}.{nearest(name, [mixture, *members])}")


def check_split(provider: "seqio.Task | seqio.Mixture", split: str) -> None:
    """Refuses a split that a task or mixture lacks."""
    splits = sorted(provider.splits)
    if split not in splits:
        raise Refusal(f"{provider.name!r} has the splits {', '.join(splits)}, received {split!r}.")


def get_provider(name: str, vocabulary: str | None = None) -> "seqio.Task | seqio.Mixture":
    """Returns a seqio task or mixture.

    Args:
        name: str. A registered task or mixture.
        vocabulary: str or None. Name or path of a vocabulary that replaces the task's, see `get_vocabulary`. The
            registered task stays unchanged.

    Raises:
        Refusal: The name is unknown, the vocabulary cannot be read, or the source of the task yields ids, not text.
    """
    check_task(name)
    seqio = import_seqio()
    provider = seqio.get_mixture_or_task(name)
    if vocabulary is None:
        return provider
    new = get_vocabulary(vocabulary)

    def change(task):
        features = {name: dataclasses.replace(feature, vocabulary=new) if _is_text(feature) else feature
                    for name, feature in task.output_features.items()}
        if features == dict(task.output_features) and new not in vocabularies_of(task):
            raise Refusal(f"{task.name!r} has ids from its source, not text, so it takes no other VOCABULARY.")
        return task.replace(output_features=features)

    return replace_tasks(provider, change)


def _is_text(feature):
    seqio = import_seqio()
    return type(feature) is seqio.Feature and not isinstance(feature.vocabulary, seqio.PassThroughVocabulary)


def text_vocabularies_of(name: str) -> list:
    """Returns the vocabularies of a task's or mixture's text features, without features that are ids in the source."""
    return [feature.vocabulary for feature in get_provider(name).output_features.values() if _is_text(feature)]


def replace_tasks(provider: "seqio.Task | seqio.Mixture", change: Callable) -> "seqio.Task | seqio.Mixture":
    """Returns a changed task, or a mixture of changed tasks.

    Args:
        provider: seqio.Task or seqio.Mixture. The registered one stays unchanged.
        change: Function from a seqio.Task to another of the same name.
    """
    seqio, made = import_seqio(), {}

    def replaced(provider):  # each once
        if provider.name not in made and isinstance(provider, seqio.Mixture):
            rates = [(replaced(provider._task_map[name]), rate) for name, rate in provider.rate_per_task_name.items()]
            made[provider.name] = seqio.Mixture(provider.name, rates, sample_fn=provider._sample_fn)
        elif provider.name not in made:
            made[provider.name] = change(provider)
        return made[provider.name]

    return replaced(provider)


def passes(one_pass: Callable[[tf.Tensor], tf.data.Dataset], seed: int | None) -> tf.data.Dataset:
    """Returns the examples of a source that shuffles.

    seqio repeats a source. TensorFlow's ways to another order in each repetition (`rerandomize_each_iteration`,
    `reshuffle_each_iteration`) lose the number of the repetition if a position is saved while prefetched examples span
    two repetitions, so a resumed run would read other examples. Here the number of the pass is part of every position.

    Args:
        one_pass: Function of a key, <int64>[2] of numbers from 0, to the tf.data.Dataset of all examples in an order
            that depends only on the key.
        seed: int, or None for a random order.

    Returns:
        Endless passes, each with its own key, for a training run. Otherwise one pass, and another one in each
        repetition.
    """
    one_pass = tf.autograph.experimental.do_not_convert(one_pass)  # conversion would take seconds
    if not context.current().endless_passes or seed is None:
        keys = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
        return keys.batch(2, drop_remainder=True).take(1).flat_map(one_pass)

    def numbered(number):
        seeds = tf.stack([tf.constant(seed, tf.int64), number])
        return one_pass(tf.random.stateless_uniform([2], seeds, 0, tf.int64.max, tf.int64))

    return tf.data.Dataset.counter().flat_map(tf.autograph.experimental.do_not_convert(numbered))


def with_counted_passes(task: Any) -> Any:
    """Returns a seqio task that reads its files in another order in each pass, if seqio itself reads them.

    Any other task is returned unchanged: its source uses `passes`, has a fixed order, or shuffles in a way that no
    position can hold (a function, or TFDS).
    """
    source = task.source
    if not isinstance(source, import_seqio().FileDataSource):
        return task

    def get_dataset(split, shuffle=True, seed=None, shard_info=None, **unused):
        if not shuffle:
            return source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=shard_info)
        files = sorted(source.list_shards(split))
        files = files[shard_info.index::shard_info.num_shards] if shard_info else files

        def one_pass(key):
            order = tf.random.experimental.stateless_shuffle(tf.constant(files), seed=key)
            return tf.data.Dataset.from_tensor_slices(order).interleave(
                source._reader, cycle_length=source._cycle_length, block_length=source._block_length,
                num_parallel_calls=tf.data.AUTOTUNE)

        return passes(one_pass, seed)

    counting = copy.copy(source)
    counting.get_dataset = get_dataset
    return task.replace(source=counting)
