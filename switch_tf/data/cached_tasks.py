"""A seqio source that reads a task's cache by index, in an order set by seed and epoch."""

import functools
import hashlib
import json
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from switch_tf.data.cache_files import SEEDS_PER_PART, CorruptRecords, open_shard
from switch_tf.data.example_files import BadData
from switch_tf.data.vocabularies import passes
from switch_tf.refusals import first_line

_RECORDS_AT_A_TIME = 64
_TOLERANCE = 0.02  # of a part's share, by which it may differ to own whole shards
_ERRORS = (RuntimeError, ValueError, IndexError)  # of array_record


class CachedSource(seqio.DataSource):
    """The tokenised examples of a task's split, in a new order in each epoch.

    Args:
        seed: Fixes the order, another one in each part. The seed that seqio passes fixes the noise.
    """

    supports_arbitrary_sharding = True  # `get_dataset` takes any number of shards

    def __init__(self, split: str, manifest: dict, folder: Any, seed: int, corrupt: CorruptRecords):
        self._count = manifest["examples"]
        super().__init__(splits=(split,), num_input_examples={split: self._count}, caching_permitted=True)
        self._manifest, self._folder, self._seed, self._corrupt = manifest, folder, seed, corrupt
        self._starts = np.cumsum([0] + [shard["examples"] for shard in manifest["shards"]])

    def list_shards(self, split: str) -> list[str]:
        """Returns the files of the split."""
        return [str(self._folder / shard["file"]) for shard in self._manifest["shards"]]

    def fingerprint(self, split: str) -> str:
        """Returns a text that identifies the content."""
        text = json.dumps(self._manifest, sort_keys=True)
        return f"{self._count} examples, {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def get_dataset(self, split: str = "train", shuffle: bool = True, seed: int | None = None,
                    shard_info: seqio.ShardInfo | None = None, **unused: Any) -> tf.data.Dataset:
        """Returns all examples, or a part of neighbouring ones, see `range_of`."""
        read = functools.partial(self._read, {})
        part = shard_info or seqio.ShardInfo(0, 1)
        first, end = self.range_of(part)

        def one_pass(key):
            places = tf.data.Dataset.range(end - first)
            if shuffle:  # saved positions name this operation
                places = places.shard(1, 0)
            places = places.map(lambda place: first + (
                place if key is None else tf.random.experimental.index_shuffle(place, key, end - first - 1)))
            records = places.batch(_RECORDS_AT_A_TIME).map(lambda place: tf.ensure_shape(tf.numpy_function(
                read, [place], tf.string, stateful=False), [None]))
            return records.unbatch().map(self._parse, num_parallel_calls=tf.data.AUTOTUNE)

        # With the same key in all parts, a batch could hold records that were neighbours in the text.
        return passes(one_pass, self._seed + part.index * SEEDS_PER_PART) if shuffle else one_pass(None)

    def range_of(self, part: seqio.ShardInfo) -> tuple[int, int]:
        """Returns the first example of a part and the last + 1. All examples, if there are fewer than parts.

        Parts have as many examples as each other, or whole shards if their sizes then differ by 4 % at most.
        """
        share = self._count / part.num_shards
        if share < 1:
            return 0, self._count
        bounds = share * np.array([part.index, part.index + 1])
        nearest = self._starts[np.abs(self._starts[:, None] - bounds).argmin(0)]
        first, end = np.where(np.abs(nearest - bounds) <= _TOLERANCE * share, nearest, np.round(bounds)).tolist()
        return int(first), int(end)

    def _read(self, readers, indices):
        """Returns bytes[<=n], examples at <int64>[n] indices."""
        records, is_read = np.empty(len(indices), object), np.ones(len(indices), bool)
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        try:
            for number in np.unique(numbers):
                shard = self._manifest["shards"][number]
                file, places = str(self._folder / shard["file"]), np.flatnonzero(numbers == number)
                rows = (indices[places] - self._starts[number]).tolist()
                try:
                    if number not in readers:
                        readers[number] = open_shard(file, shard["sha256"])
                except BadData:
                    raise
                except _ERRORS as error:
                    raise BadData(f"{file} is damaged ({first_line(error)}); `switch-tf cache` with the task's gin "
                                  "file finds damaged shards and writes them anew.") from error
                try:
                    records[places] = readers[number].read(rows)
                except _ERRORS:
                    for row, place in zip(rows, places, strict=True):
                        try:
                            (records[place],) = readers[number].read([row])
                        except _ERRORS as error:
                            self._corrupt.add(file, row, error)
                            is_read[place] = False
        except BaseException:
            self._corrupt.has_failed = True
            raise
        return records[is_read]

    def _parse(self, record):
        stored, features = {}, self._manifest["features"]
        for name, feature in features.items():
            dtype, shape = tf.as_dtype(feature["dtype"]), feature["shape"]
            dtype = dtype if dtype in (tf.string, tf.float32) else tf.int64
            stored[name] = (tf.io.FixedLenSequenceFeature(shape[1:], dtype, allow_missing=True) if shape
                            else tf.io.FixedLenFeature([], dtype))
        return {name: tf.cast(value, features[name]["dtype"])
                for name, value in tf.io.parse_single_example(record, stored).items()}
