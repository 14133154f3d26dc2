"""From a description to tf.data batches of seqio's model features, the same in every process, resumable."""

import contextlib

import tensorflow as tf
from tensorflow.python.eager import context as eager_context  # the global seed has no public getter

from switch_tf import checks
from switch_tf.data.description import FEATURES, DatasetDescription
from switch_tf.data.providers import check_split, get_provider, import_seqio


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
def get_dataset(description: DatasetDescription) -> tf.data.Dataset:
    """Returns batches of seqio's model features, the same in every process that asks for the same.

    The train split is shuffled and repeated forever, with new noise in every epoch. Any other split is read once, in
    order: every example counts once, and the last batch is filled with rows of zeros, which have no targets and no
    loss weights; a mixture then ends when all of its tasks have.

    A `tf.train.Checkpoint(iterator=iter(dataset))` holds the exact position: restored in another process, it goes on
    with the next batch, bit for bit.

    Args:
        description: DatasetDescription.

    Returns: tf.data.Dataset of `{feature: <int32>[batch_size, length]}`, prefetched.

    Raises:
        ValueError: an unknown name or split, lengths the task cannot use, features the model cannot.
    """
    if not isinstance(description, DatasetDescription):
        raise ValueError(f"description must be a DatasetDescription, not {checks.shown(description)}.")
    provider = get_provider(description.mixture_or_task_name)
    check_split(provider, description.split)
    converter = _feature_converter(provider, description)
    lengths, batch_size = dict(description.task_feature_lengths), description.batch_size
    arguments = {
        "sequence_length": lengths, "split": description.split, "shuffle": description.is_training,
        "seed": description.seed,
        # seqio would keep the examples of small tasks in memory, in the order of the first epoch, and write all of
        # them into every checkpoint of the iterator.
        "try_in_mem_cache": False,
    }  # fmt: skip
    if description.is_training:
        examples = provider.get_dataset(**arguments, num_epochs=None)
        batches = converter(examples, lengths).batch(batch_size, drop_remainder=True)
    else:
        examples = _read_once(provider, arguments)
        batches = converter(examples, lengths).batch(batch_size)
        batches = batches.map(lambda batch: _fill_rows(batch, batch_size), num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def _feature_converter(provider, description):
    seqio = import_seqio()
    ranks = {name: feature.rank for name, feature in provider.output_features.items()}
    if not set(FEATURES) <= set(ranks):
        raise ValueError(f"The model reads inputs and targets, but {provider.name!r} has only {', '.join(ranks)}.")
    if description.pack and set(ranks.values()) != {1}:
        raise ValueError(f"Packing needs features that are sequences of tokens (rank 1), received ranks {ranks}.")
    if description.encoder_only:
        mask_id = provider.output_features["inputs"].vocabulary.vocab_size - 1
        return seqio.EncoderFeatureConverter(mask_id=mask_id, pack=description.pack)
    return seqio.EncDecFeatureConverter(pack=description.pack)


def _read_once(provider, arguments):
    """Returns all examples of a split, each once; seqio's own mixture would end with its first task."""
    seqio = import_seqio()
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
