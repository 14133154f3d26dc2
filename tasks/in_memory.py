"""A seqio source of examples that fit into memory, shuffled whole."""

from collections.abc import Callable, Mapping
from typing import Any

import seqio
import tensorflow as tf

from switch_tf import data


class InMemorySource(seqio.DataSource):
    """Examples that a function returns.

    All of them are shuffled, without a window, in an order that a checkpoint of the iterator holds as one key.

    Args:
        name: str. Name of the data.
        read: Function from a split to its examples, `{feature: list of str}`, called at the first use.
        num_examples: Split -> number of examples.
        content: Digest of the text of all splits, or a function that returns it.
    """

    def __init__(self, name: str, read: Callable, num_examples: Mapping[str, int], content: str | Callable):
        super().__init__(splits=tuple(num_examples), num_input_examples=dict(num_examples))
        self._name = name
        self._read = read
        self._content = content

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Whether `get_dataset` takes any number of shards: it does."""
        return True

    def list_shards(self, split: str) -> list[str]:
        """Returns one name that is no file, because the examples have no shards."""
        return [f"{self._name}: {split}"]

    def fingerprint(self, split: str) -> str:
        """Returns the digest of the text of all splits."""
        return self._content if isinstance(self._content, str) else self._content()

    def get_dataset(self, split: str = "train", shuffle: bool = True, seed: int | None = None,
                    shard_info: seqio.ShardInfo | None = None, **unused: Any) -> tf.data.Dataset:
        """Returns the examples of a split, or every n-th of the shuffled examples for n shards."""
        columns = self._read(split)
        texts = {name: tf.constant(column, tf.string) for name, column in columns.items()}
        count = len(next(iter(columns.values())))

        def one_pass(key):
            # Dataset.shuffle would write its buffer, for the docs corpus 7 MB, into every checkpoint.
            order = tf.range(count, dtype=tf.int64)
            order = order if key is None else tf.random.experimental.stateless_shuffle(order, seed=key)
            indices = tf.data.Dataset.from_tensor_slices(order)
            return indices.shard(shard_info.num_shards, shard_info.index) if shard_info else indices

        def example(index):
            return {name: column[index] for name, column in texts.items()}

        indices = data.passes(one_pass, seed) if shuffle else one_pass(None)
        return indices.map(example, num_parallel_calls=tf.data.AUTOTUNE)
