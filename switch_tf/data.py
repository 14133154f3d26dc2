"""From the name of a seqio task or mixture to batches of model features.

The one library module that imports seqio, and only when a function needs it. Tasks are known by name: a gin file
(`gin/tasks/`) imports the module that registers them.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Mapping

import keras
import tensorflow as tf
from tensorflow.python.eager import context as eager_context  # the global seed has no public getter

_FEATURES = ("inputs", "targets")


@contextlib.contextmanager
def _no_global_seed():
    """Within this scope the seeds of new pipelines are theirs alone; TensorFlow would mix in `tf.random.set_seed`'s."""
    state = eager_context.context()
    saved, state._seed = state._seed, None
    try:
        yield
    finally:
        state._seed = saved


@_no_global_seed()
def get_dataset(
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    split: str = "train",
    seed: int = 0,
    pack: bool = False,
    shuffle: bool | None = None,
    repeat: bool | None = None,
    shard_index: int = 0,
    num_shards: int = 1,
    encoder_only: bool = False,
) -> tf.data.Dataset:
    """Returns batches of seqio's model features, the same in every process that asks for the same.

    The train split is shuffled and repeated forever; any other split is read once, in order. A repeated data set is
    sharded at its source. One that ends is not: every shard reads all of it and keeps its own rows of each batch, so
    all shards make the same number of steps, and the examples do not depend on `num_shards`.

    A `tf.train.Checkpoint(iterator=iter(dataset))` holds the exact position: restored in another process, it goes on
    with the next batch, bit for bit.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        task_feature_lengths: tokens per sequence, for example `{"inputs": 512, "targets": 114}`.
        batch_size: int. Sequences in the global batch.
        split: str. A split of the task.
        seed: int. Fixes the order and the noise.
        pack: bool. Several examples per sequence, told apart by segment ids.
        shuffle: bool. None: only the train split.
        repeat: bool. Whether to start again at the end, with new noise. None: only the train split. Where it is
            False, every example counts once and the last batch is filled with rows of zeros, which have no targets
            and no loss weights; a mixture then ends when all of its tasks have.
        shard_index: int. Which shard this is, from 0.
        num_shards: int. Readers of the global batch, one per host.
        encoder_only: bool. Features for an encoder without a decoder: inputs in which the last id of the vocabulary
            masks tokens, and targets of the same length.

    Returns: tf.data.Dataset of `{feature: <int32>[batch_size / num_shards, length]}`, prefetched.

    Raises:
        ValueError: an unknown name or split, lengths the task cannot use, a batch that the shards do not divide.
    """
    seqio = _import_seqio()
    provider = _get_provider(mixture_or_task_name)
    is_training = split == "train"
    shuffle = is_training if shuffle is None else shuffle
    repeat = is_training if repeat is None else repeat
    rows = _rows_per_shard(batch_size, shard_index, num_shards)
    _check_lengths(task_feature_lengths, encoder_only)
    _check_split(provider, split)
    converter = _feature_converter(provider, pack, encoder_only)
    arguments = {
        "sequence_length": dict(task_feature_lengths), "split": split, "shuffle": shuffle, "seed": seed,
        # seqio would keep the examples of small tasks in memory, in the order of the first epoch, and write all of
        # them into every checkpoint of the iterator.
        "try_in_mem_cache": False,
    }  # fmt: skip
    if repeat:
        shard = seqio.ShardInfo(shard_index, num_shards) if num_shards > 1 else None
        examples = provider.get_dataset(**arguments, num_epochs=None, shard_info=shard)
        batches = converter(examples, task_feature_lengths).batch(rows, drop_remainder=True)
    else:
        examples = _read_once(provider, arguments)
        batches = converter(examples, task_feature_lengths).batch(batch_size)
        batches = batches.map(lambda batch: _fill_rows(batch, batch_size), num_parallel_calls=tf.data.AUTOTUNE)
        first = shard_index * rows
        batches = batches.map(lambda batch: {name: tokens[first : first + rows] for name, tokens in batch.items()})
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def vocabulary_size(mixture_or_task_name: str) -> int:
    """Returns the number of ids that the vocabulary of a task or mixture has, sentinels included.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the vocabulary cannot be read.
    """
    features = _get_provider(mixture_or_task_name).output_features.values()
    try:
        return max(feature.vocabulary.vocab_size for feature in features)
    except (OSError, tf.errors.OpError) as error:
        paths = {str(getattr(feature.vocabulary, "sentencepiece_model_file", "")) for feature in features}
        raise RuntimeError(
            f"The vocabulary of {mixture_or_task_name!r}, {', '.join(sorted(paths))}, cannot be read "
            f"({type(error).__name__}); a gs:// path needs network access to Google Cloud Storage."
        ) from error


def check_vocabulary(mixture_or_task_name: str, vocab_size: int) -> None:
    """Refuses a model that has no embedding for some token of the task.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        vocab_size: int. Rows of the model's embedding.

    Raises:
        ValueError: the task's vocabulary is larger.
    """
    needed = vocabulary_size(mixture_or_task_name)
    if vocab_size < needed:
        raise ValueError(
            f"The model has vocab_size {vocab_size}, but {mixture_or_task_name!r} has token ids up to {needed - 1}; "
            f"set SwitchConfig.vocab_size to at least {needed}, or choose a task with a smaller vocabulary."
        )


def check_task(name: str) -> None:
    """Refuses a name that no task and no mixture has.

    Raises:
        ValueError: names the nearest registered ones.
    """
    seqio = _import_seqio()
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(nearest)}" if nearest else f"registered are {', '.join(known) or 'none'}"
    raise ValueError(
        f"No task or mixture is called {name!r}: {hint}; tasks are registered by the module that a gin file imports, "
        "for example --gin_file=gin/tasks/docs_corpus.gin."
    )


def keep_jax_on_cpu() -> None:
    """Keeps seqio's metrics, which run on JAX, from taking the accelerator that TensorFlow trains on.

    Does nothing where Keras itself runs on JAX, or where JAX_PLATFORMS is set.
    """
    if keras.config.backend() != "tensorflow":
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # TensorFlow imports it, before anyone could set the variable
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def _import_seqio():
    keep_jax_on_cpu()
    import seqio

    return seqio


def _get_provider(name):
    """Returns the seqio task or mixture of that name."""
    check_task(name)
    return _import_seqio().get_mixture_or_task(name)


def _feature_converter(provider, pack, encoder_only):
    seqio = _import_seqio()
    ranks = {name: feature.rank for name, feature in provider.output_features.items()}
    if not set(_FEATURES) <= set(ranks):
        raise ValueError(f"The model reads inputs and targets, but {provider.name!r} has only {', '.join(ranks)}.")
    if pack and set(ranks.values()) != {1}:
        raise ValueError(f"Packing needs features that are sequences of tokens (rank 1), received ranks {ranks}.")
    if encoder_only:
        mask_id = provider.output_features["inputs"].vocabulary.vocab_size - 1
        return seqio.EncoderFeatureConverter(mask_id=mask_id, pack=pack)
    return seqio.EncDecFeatureConverter(pack=pack)


def _read_once(provider, arguments):
    """Returns all examples of a split, each once; seqio's own mixture would end with its first task."""
    seqio = _import_seqio()
    if isinstance(provider, seqio.Task):
        return provider.get_dataset(**arguments, num_epochs=1)
    tasks = [task for task in provider.tasks if arguments["split"] in task.splits]
    features = set(provider.output_features)
    datasets = [provider.get_task_dataset(task, features, **arguments, num_epochs=1) for task in tasks]
    rates = [provider.get_rate(task) for task in tasks]
    return tf.data.Dataset.sample_from_datasets(datasets, rates, arguments["seed"], stop_on_empty_dataset=False)


def _fill_rows(batch, batch_size):
    """Adds rows of zeros to a last batch that has fewer than `batch_size`."""
    filled = {}
    for name, tokens in batch.items():
        missing = batch_size - tf.shape(tokens)[0]
        filled[name] = tf.ensure_shape(tf.pad(tokens, [[0, missing], [0, 0]]), [batch_size, tokens.shape[1]])
    return filled


def _rows_per_shard(batch_size, shard_index, num_shards):
    if batch_size < 1 or num_shards < 1 or batch_size % num_shards:
        raise ValueError(
            f"Every shard gets the same number of sequences, at least one, received a batch of {batch_size} for "
            f"{num_shards} shards; set BATCH_SIZE to a positive multiple of the number of shards."
        )
    if not 0 <= shard_index < num_shards:
        raise ValueError(f"shard_index is 0 to {num_shards - 1} with {num_shards} shards, received {shard_index}.")
    return batch_size // num_shards


def _check_lengths(lengths, encoder_only):
    if set(lengths) != set(_FEATURES) or not all(isinstance(n, int) and n > 0 for n in lengths.values()):
        raise ValueError(
            "TASK_FEATURE_LENGTHS gives the number of tokens of inputs and targets, as in "
            f'{{"inputs": 512, "targets": 114}}, received {dict(lengths)}.'
        )
    if encoder_only and lengths["inputs"] != lengths["targets"]:
        raise ValueError(
            "An encoder without a decoder predicts one target per input token, so both have the same length, received "
            f"{dict(lengths)}; set targets to {lengths['inputs']}."
        )


def _check_split(provider, split):
    splits = sorted(provider.splits)
    if split not in splits:
        raise ValueError(f"{provider.name!r} has the splits {', '.join(splits)}, received {split!r}.")
