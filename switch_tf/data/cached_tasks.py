"""Tasks that read their cache (`cache_writing.py`) by index, in an order that depends only on seed and epoch."""

import functools
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epy

from switch_tf.data import cache_files
from switch_tf.data.cache_files import CorruptRecords, fetched_shard
from switch_tf.data.example_files import BadData
from switch_tf.data.providers import get_provider, passes, replace_tasks, tasks_of
from switch_tf.refusals import first_line

with epy.lazy_imports():  # when a file is read, in the process that reads it
    from array_record.python import array_record_module

_RECORDS_AT_A_TIME = 64
# array_record's advice for random access: no threads that read ahead, with a buffer of 16 MB each.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_ERRORS = (RuntimeError, ValueError, IndexError)  # of array_record


class CachedSource(seqio.DataSource):
    """The tokenised examples of a task, in another order in each epoch.

    Args:
        manifests: Split -> result of `cache_files.load`.
        folders: Split -> folder.
        seed: int. Fixes the order. The seed that seqio passes, which fixes the noise, may differ between shards.
        corrupt: CorruptRecords, which decides about records that cannot be read.
    """

    def __init__(self, manifests: dict[str, dict], folders: dict[str, pathlib.Path], seed: int,
                 corrupt: CorruptRecords):
        counts = {split: manifest["examples"] for split, manifest in manifests.items()}
        super().__init__(splits=tuple(manifests), num_input_examples=counts, caching_permitted=True)
        self._manifests, self._folders, self._seed, self._corrupt = manifests, folders, seed, corrupt

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Whether `get_dataset` takes any number of shards: it does."""
        return True

    def list_shards(self, split: str) -> list[str]:
        """Returns the files of a split."""
        return [str(self._folders[split] / shard["file"]) for shard in self._manifests[split]["shards"]]

    def fingerprint(self, split: str) -> str:
        """Returns a text that identifies the content of the cache."""
        text = json.dumps(self._manifests[split], sort_keys=True)
        return f"{self._manifests[split]['examples']} examples, {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def get_dataset(self, split: str = "train", shuffle: bool = True, seed: int | None = None,
                    shard_info: seqio.ShardInfo | None = None, **unused: Any) -> tf.data.Dataset:
        """Returns the examples of a split, every n-th of them for n shards, all if there are fewer than shards."""
        manifest = self._manifests[split]
        count = manifest["examples"]
        reader = _Reader(self.list_shards(split), manifest["shards"], self._corrupt)
        parse = functools.partial(_parse, manifest["features"])

        def one_pass(key):
            places = tf.data.Dataset.range(count)
            if shard_info and count >= shard_info.num_shards:
                places = places.shard(shard_info.num_shards, shard_info.index)
            if key is not None:
                places = places.map(lambda place: tf.random.experimental.index_shuffle(place, key, count - 1))
            records = places.batch(_RECORDS_AT_A_TIME).map(lambda place: tf.ensure_shape(tf.numpy_function(
                reader.read, [place], tf.string, stateful=False), [None]))
            return records.unbatch().map(parse, num_parallel_calls=tf.data.AUTOTUNE)

        if not shuffle:
            return one_pass(None)
        return passes(one_pass, self._seed)


def get_cached_provider(name: str, vocabulary: str | None, cache_dir: str | None, split: str, seed: int,
                        num_parts: int = 1, corrupt: CorruptRecords | None = None) -> seqio.Task | seqio.Mixture:
    """Returns a task or mixture that reads a split from the cache.

    Args:
        name: str. A registered seqio task or mixture.
        vocabulary: str or None, see `get_provider`.
        cache_dir: str or None, see `cache_files.folder_of`.
        split: str. A task of a mixture that lacks it stays unchanged.
        seed: int. Fixes the order.
        num_parts: int. Number of shards that are read at the same time. They share the size of the shuffle buffer.
        corrupt: CorruptRecords of the part. None leaves out no record.

    Raises:
        Refusal: See `get_provider`; or the cache is missing, unfinished, damaged or stale.
    """

    def change(task):
        if not cache_files.folder_of(cache_dir, task.name, split).exists() and split not in task.splits:
            return task
        place = cache_files.placeholder_of(task)
        source = CachedSource({split: cache_files.load(task, split, cache_dir)},
                              {split: cache_files.folder_of(cache_dir, task.name, split)}, seed,
                              corrupt or CorruptRecords())
        # seqio counts seeds from the index of the placeholder. It keeps its index, so the noise is that of the text.
        steps = [_identity] * place + list(task.preprocessors[place:])
        buffer = task._shuffle_buffer_size and max(1, task._shuffle_buffer_size // num_parts)
        return task.replace(source=source, preprocessors=steps, shuffle_buffer_size=buffer)

    return replace_tasks(get_provider(name, vocabulary), change)


def cache_fingerprint(name: str, vocabulary: str | None, cache_dir: str | None, split: str) -> dict[str, str]:
    """Returns "task: cache" -> text that identifies the content of a split's cache.

    Raises:
        Refusal: See `get_cached_provider`.
    """
    provider = get_cached_provider(name, vocabulary, cache_dir, split, 0)
    return {f"{task.name}: cache": task.source.fingerprint(split) for task in tasks_of(provider, split)}


class _Reader:
    """Records by their index over all files, which are opened at their first use."""

    def __init__(self, files, shards, corrupt):
        self._files, self._shards, self._corrupt = files, shards, corrupt
        self._starts = np.cumsum([0] + [shard["examples"] for shard in shards])
        self._opened = {}

    def read(self, indices):
        """Returns serialised examples, bytes[<=n], of <int64>[n] indices, without those that are left out."""
        try:
            return self._read(indices)
        except BaseException:
            self._corrupt.has_failed = True
            raise

    def _read(self, indices):
        records, is_read = np.empty(len(indices), object), np.ones(len(indices), bool)
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            rows = indices[places] - self._starts[number]
            try:
                reader = self._reader(number)
            except BadData:
                raise
            except _ERRORS as error:
                raise BadData(f"{self._files[number]} is damaged ({first_line(error)}); `switch-tf cache` with the "
                              "task's gin file finds damaged shards and writes them anew.") from error
            try:
                records[places] = reader.read(rows.tolist())
            except _ERRORS:
                is_read[places] = [self._read_one(reader, number, int(row), records, place)
                                   for row, place in zip(rows, places, strict=True)]
        return records[is_read]

    def _read_one(self, reader, number, row, records, place):
        """Reads a record into its place; returns False if it is left out."""
        try:
            (records[place],) = reader.read([row])
        except _ERRORS as error:
            self._corrupt.add(self._files[number], row, error)
            return False
        return True

    def _reader(self, number):
        if number not in self._opened:
            file = fetched_shard(self._files[number], self._shards[number]["sha256"])
            self._opened[number] = array_record_module.ArrayRecordReader(file, _READER_OPTIONS)
        return self._opened[number]


def _parse(features, record):
    """Returns the tensors of a serialised example, with the dtypes before the cache."""
    stored = {}
    for name, feature in features.items():
        dtype, shape = tf.as_dtype(feature["dtype"]), feature["shape"]
        stored_dtype = dtype if dtype in (tf.string, tf.float32) else tf.int64
        stored[name] = (tf.io.FixedLenSequenceFeature(shape[1:], stored_dtype, allow_missing=True) if shape
                        else tf.io.FixedLenFeature([], stored_dtype))
    parsed = tf.io.parse_single_example(record, stored)
    return {name: tf.cast(value, features[name]["dtype"]) if features[name]["dtype"] != "string" else value
            for name, value in parsed.items()}


def _identity(dataset):
    return dataset
