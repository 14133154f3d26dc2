"""A folder with a teacher's stored predictions, found by the keys of rows.

`00003.array_record` has rows, `00003.keys` their keys in the same order and `00003.json` the checksums of both, which
is written last: a shard without it does not count. `manifest.json` says whose predictions they are, and of what.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epy

from switch_tf.data import cache_files
from switch_tf.data.cache_files import fetched_shard
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading
from switch_tf.surgery.prediction_rows import KEY_BYTES, RowFormat

with epy.lazy_imports():  # only stored predictions need it
    from array_record.python import array_record_module

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # array_record's advice for random access
_OPEN_SHARDS = 64
_ROWS_PER_SHARD = 2**32  # more than one can have; a place is shard * _ROWS_PER_SHARD + row


def read_manifest(folder: Any) -> dict:
    """Returns the manifest.

    Raises:
        Refusal: the folder has none that can be read.
    """
    made_by = f"`switch-tf cache --teacher` with the student's gin files and --output {folder}"
    with reading(folder):
        if not (folder / MANIFEST).is_file():
            raise Refusal(f"TEACHER_PREDICTIONS must be a folder of stored predictions, and {folder} has no "
                          f"{MANIFEST}; make it by {made_by}.")
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            format_of(manifest)
        except (ValueError, KeyError, TypeError):
            raise Refusal(f"{folder / MANIFEST} is damaged; make the folder anew by {made_by} and --overwrite."
                          ) from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise Refusal(f"{folder} has stored predictions of format {manifest.get('format_version')}, and this version "
                      f"reads format {FORMAT_VERSION}; make it anew by {made_by} and --overwrite.")
    return manifest


def format_of(manifest: dict) -> RowFormat:
    """Returns the sizes of a manifest's rows."""
    return RowFormat(manifest["task_feature_lengths"]["targets"], manifest["top_k"], manifest["vocab_size"])


def shard_files(folder: Any, number: int) -> tuple[Any, Any, Any]:
    """Returns the paths of a shard's rows, keys and checksums."""
    return tuple(folder / f"{number:05d}.{ending}" for ending in ("array_record", "keys", "json"))


def shard_numbers(folder: Any) -> list[int]:
    """Returns the numbers of all shards that have a description."""
    return sorted(int(file.stem) for file in folder.iterdir() if file.suffix == ".json" and file.stem.isdigit())


class DamagedShard(Refusal):
    """A shard whose files are not those that were written."""


def read_keys(folder: Any, number: int) -> tuple[dict, np.ndarray]:
    """Returns the description of a shard and its keys, <bytes16>[rows], after comparing its files' sizes and the keys.

    Raises:
        DamagedShard: a file is missing or differs.
    """
    rows, keys, described = shard_files(folder, number)
    try:
        description = json.loads(described.read_text())
        content = keys.read_bytes()
        is_whole = (hashlib.sha256(content).hexdigest() == description["keys_sha256"]
                    and places.size(rows) == description["bytes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise _damaged(rows, folder)
    return description, np.frombuffer(content, f"S{KEY_BYTES}")


def check_rows(folder: Any, number: int, description: dict) -> str:
    """Returns the path of a local file with a shard's rows, after comparing its checksum.

    Raises:
        DamagedShard: it differs.
        BadData: it differs, in a bucket.
    """
    rows, _, _ = shard_files(folder, number)
    if places.is_local(rows) and cache_files.checksum(rows) != description["sha256"]:
        raise _damaged(rows, folder)
    return fetched_shard(str(rows), description["sha256"])


def _damaged(file, folder):
    return DamagedShard(f"{file} is damaged or lacks a file beside it; the same `switch-tf cache --teacher` with "
                        f"--output {folder} finds it and writes its rows anew.")


class KeyIndex:
    """Places of keys, sorted for the search: 24 bytes for each key."""

    def __init__(self):
        self._keys, self._places = np.empty(0, f"S{KEY_BYTES}"), np.empty(0, np.int64)

    def __len__(self):
        return len(self._keys)

    def add(self, shards: Sequence[tuple[int, np.ndarray]]) -> None:
        """Adds the keys of shards, given as number and <bytes16>[rows]."""
        keys = np.concatenate([self._keys, *(added for _, added in shards)])
        where = np.concatenate([self._places, *(number * _ROWS_PER_SHARD + np.arange(len(added), dtype=np.int64)
                                                for number, added in shards)])
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], where[order]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the place of each key, <int64>[keys], -1 for one that is not there."""
        if not len(self):
            return np.full(len(keys), -1)
        found = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[found] == keys, self._places[found], -1)


class PredictionStore:
    """The complete shards of a folder, read at any place.

    Args:
        folder: Path of the folder.

    Raises:
        Refusal: it has no manifest, no rows, or a damaged shard.
    """

    def __init__(self, folder: pathlib.Path):
        self.manifest = read_manifest(folder)
        self._folder, self._index = folder, KeyIndex()
        with reading(folder):
            shards = {number: read_keys(folder, number) for number in shard_numbers(folder)}
        self._descriptions = {number: description for number, (description, _) in shards.items()}
        if not any(len(keys) for _, keys in shards.values()):
            raise Refusal(f"TEACHER_PREDICTIONS: {folder} has no predictions yet; the `switch-tf cache --teacher` that "
                          "began it goes on.")
        self._index.add([(number, keys) for number, (_, keys) in shards.items()])
        # Checked when they are opened, because rows of a seed are read shard by shard.
        self._checked = {}
        self._reader = functools.lru_cache(_OPEN_SHARDS)(self._open)

    def read(self, keys: np.ndarray) -> list[bytes] | None:
        """Returns the bytes of rows by their keys, <bytes16>[rows]; None if one is not there.

        Raises:
            Refusal: a shard is damaged.
        """
        where = self._index.find(keys)
        if (where < 0).any():
            return None
        rows: list[Any] = [None] * len(keys)
        for number, chosen in _by_shard(where // _ROWS_PER_SHARD):
            try:
                found = self._reader(number).read((where[chosen] % _ROWS_PER_SHARD).tolist())
            except (RuntimeError, IndexError) as error:
                raise _damaged(f"{shard_files(self._folder, number)[0]} ({first_line(error)})", self._folder) from error
            for place, row in zip(chosen, found, strict=True):
                rows[place] = row
        return rows

    def _open(self, number):
        if number not in self._checked:
            self._checked[number] = check_rows(self._folder, number, self._descriptions[number])
        return array_record_module.ArrayRecordReader(self._checked[number], _READER_OPTIONS)


def _by_shard(numbers) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each number with the indices of its entries."""
    for number in np.unique(numbers):
        yield int(number), np.flatnonzero(numbers == number)
