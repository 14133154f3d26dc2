"""Endless passes over a training split, each in another order.

seqio repeats a source. TensorFlow's ways to another order in each repetition (`rerandomize_each_iteration`,
`reshuffle_each_iteration`) lose the number of the repetition if a position is saved while prefetched examples span two
repetitions, so a resumed run would read other examples. Here the number of the pass is part of every position.
"""

import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from switch_tf import context
from switch_tf.data.seqio_import import import_seqio


def passes(one_pass: Callable[[tf.Tensor], tf.data.Dataset], seed: int | None) -> tf.data.Dataset:
    """Returns the examples of a source that shuffles.

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
