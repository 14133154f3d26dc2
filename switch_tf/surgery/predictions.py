"""A teacher's stored predictions of training rows: format, reader and writer.

A row is found by a hash of its content, so the batches and the number of processes may change. For every target it has
k token ids (uint16 or int32), their log-probabilities (float16), the log-probability of all other tokens and the
target's log-probability at temperature 1 (float32). A shard without checksums does not count.
"""

import functools
import hashlib
import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from switch_tf.data import cache_files
from switch_tf.data.cache_files import write_records
from switch_tf.data.example_files import BadData
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines, leftovers, places
from switch_tf.storage.whole_file import reading, remove, write_whole, writing

# Features of predictions in a batch. They are int32, and floats are bit-cast.
IDS, LOG_PROBS, LOG_REST, TARGET_LOG_PROBS = NAMES = (
    "teacher_token_ids", "teacher_log_probs", "teacher_log_rest", "teacher_target_log_probs")
MANIFEST = "manifest.json"
_FORMAT_VERSION = 1
_READ = ("teacher", "teacher_capacity_factor", "temperature", "vocabulary", "pack", "reads")
_KEY = np.dtype("S16")
_LOWEST = -6e4  # near float16's minimum, below any float32 log-probability
_OPEN_SHARDS = 64
_MOST_KEYS = 2**28  # bytes
# A shard is written at either limit. A kill loses unwritten rows.
_BYTES_PER_SHARD = 2**28
_SECONDS_PER_SHARD = 60
_OWN = re.compile(r"\d{5,}\.(array_record|keys|json)|manifest\.json")


def keys_of(features: dict[str, np.ndarray]) -> np.ndarray:
    """Returns <bytes16>[rows], a 128-bit hash of each row of the features, <int32>[rows, length] by name."""
    rows = np.ascontiguousarray(np.concatenate([features[name] for name in sorted(features)], axis=1), "<i4")
    return np.array([hashlib.blake2b(row, digest_size=_KEY.itemsize).digest() for row in rows], _KEY)


def row_dtype(manifest: dict) -> np.dtype:
    """Returns the dtype of a stored row, with a field for each of `NAMES`."""
    length, top_k = manifest["task_feature_lengths"]["targets"], manifest["top_k"]
    return np.dtype([(IDS, "<u2" if manifest["vocab_size"] <= 2**16 else "<i4", (length, top_k)),
                     (LOG_PROBS, "<f2", (length, top_k)), (LOG_REST, "<f4", (length,)),
                     (TARGET_LOG_PROBS, "<f4", (length,))])


def pack(dtype: np.dtype, predictions: Sequence[np.ndarray], is_target: np.ndarray) -> list[bytes]:
    """Returns the bytes of rows, with zeros where there is no target.

    Args:
        predictions: Values of `NAMES`, <number>[rows, length, k] for two and <float32>[rows, length] for two.
        is_target: <bool>[rows, length].
    """
    rows = np.zeros(len(is_target), dtype)
    for name, values in zip(NAMES, predictions, strict=True):
        kept = is_target[..., None] if values.ndim == 3 else is_target
        rows[name] = np.where(kept, values if name == IDS else np.maximum(values, _LOWEST), 0)
    return [row.tobytes() for row in rows]


def _unpack(dtype, rows):
    """Returns the features of rows, <int32>[rows, width] by name."""
    records = np.frombuffer(b"".join(rows), dtype)
    features = {name: records[name].astype("int32" if name == IDS else "float32") for name in NAMES}
    # Restores the sums of probabilities before float16 rounding.
    expected = np.maximum(-np.expm1(features[LOG_REST]), 1e-30)
    features[LOG_PROBS] += np.log(expected / np.exp(features[LOG_PROBS]).sum(axis=-1))[..., None]
    return {name: values.view("int32").reshape(len(rows), -1) for name, values in features.items()}


def read_manifest(folder: Any) -> dict:
    """Returns the manifest of a folder."""
    made_by = f"`switch-tf cache --teacher` with the student's gin files and --output {folder}"
    with reading(folder):
        try:
            manifest = json_lines.load(folder / MANIFEST)
            row_dtype(manifest)
            for name in _READ:
                manifest[name]
        except (FileNotFoundError, NotADirectoryError):
            raise Refusal(f"TEACHER_PREDICTIONS must be a folder of stored predictions, and {folder} has no "
                          f"{MANIFEST}; make it by {made_by}.") from None
        except (ValueError, KeyError, TypeError):
            raise Refusal(f"{folder / MANIFEST} is damaged; make the folder anew by {made_by} and --overwrite."
                          ) from None
    if manifest.get("format_version") != _FORMAT_VERSION:
        raise Refusal(f"{folder} has stored predictions of format {manifest.get('format_version')}, and this version "
                      f"reads format {_FORMAT_VERSION}; make it anew by {made_by} and --overwrite.")
    return manifest


def _damage(rows, folder):
    return BadData(f"{rows} is damaged or lacks a file beside it; the same `switch-tf cache --teacher` with --output "
                   f"{folder} finds it and writes its rows anew.")


def _files(folder, number):
    return tuple(folder / f"{number:05d}.{ending}" for ending in ("array_record", "keys", "json"))


def shard_numbers(folder: Any) -> list[int]:
    """Returns the numbers of all shards that have a description."""
    return sorted(int(file.stem) for file in folder.iterdir() if file.suffix == ".json" and file.stem.isdigit())


def read_keys(folder: Any, number: int) -> tuple[np.ndarray, str]:
    """Returns the keys of a shard, <bytes16>[rows], and the checksum of its rows, after comparing sizes and keys.

    Raises:
        BadData: A file is missing or differs.
    """
    rows, keys, described = _files(folder, number)
    try:
        description = json_lines.load(described)
        content = places.content(keys, _MOST_KEYS)
        if not rows.is_file() or (places.size(rows), hashlib.sha256(content).hexdigest()) != (
                description["bytes"], description["keys_sha256"]):
            raise ValueError("another size or checksum")
        return np.frombuffer(content, _KEY), description["sha256"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise _damage(rows, folder) from error


def _find(known, keys):
    """Returns indices among sorted keys, -1 for a missing key."""
    indices = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[indices] == keys, indices, -1)


class PredictionStore:
    """The complete shards of a folder, for random access."""

    def __init__(self, folder: pathlib.Path):
        self.manifest, self._folder = read_manifest(folder), folder
        self.row_dtype = row_dtype(self.manifest)
        with reading(folder):
            shards = {number: read_keys(folder, number) for number in shard_numbers(folder)}
        keys = np.concatenate([np.zeros(0, _KEY), *(own for own, _ in shards.values())])
        # Row numbers run through all shards. A key takes 24 bytes of memory.
        self._rows = np.argsort(keys)
        self._keys, checksums = keys[self._rows], {number: checksum for number, (_, checksum) in shards.items()}
        self._numbers, self._starts = list(shards), np.cumsum([0, *(len(own) for own, _ in shards.values())])
        if not len(keys):
            raise Refusal(f"TEACHER_PREDICTIONS: {folder} has no predictions yet; the `switch-tf cache --teacher` that "
                          "began it goes on.")
        # Verified when first opened: the rows of a seed are read shard by shard.
        is_unchanged = functools.cache(cache_files.is_unchanged)

        @functools.lru_cache(_OPEN_SHARDS)
        def reader(number):
            rows, checksum = _files(folder, number)[0], checksums[number]
            if not is_unchanged(rows, checksum):
                raise _damage(rows, folder)
            return cache_files.open_shard(str(rows), checksum)

        self._reader = reader

    def read(self, keys: np.ndarray) -> dict[str, np.ndarray] | None:
        """Returns the features of rows by key, <int32>[rows, width] by name, or None if a row is missing."""
        indices = _find(self._keys, keys)
        if (indices < 0).any():
            return None
        rows, where = np.empty(len(keys), object), self._rows[indices]
        shards = np.searchsorted(self._starts, where, side="right") - 1
        for shard in np.unique(shards):
            chosen, number = np.flatnonzero(shards == shard), self._numbers[shard]
            try:
                rows[chosen] = self._reader(number).read((where[chosen] - self._starts[shard]).tolist())
                if any(len(row) != self.row_dtype.itemsize for row in rows[chosen]):
                    raise IndexError("a row of another size")
            except (RuntimeError, IndexError) as error:
                file = _files(self._folder, number)[0]
                raise _damage(f"{file} ({first_line(error)})", self._folder) from error
        return _unpack(self.row_dtype, rows)


class PredictionWriter:
    """A writer of rows to a new folder, or to a folder with the same request.

    Damaged or unfinished shards are removed first.

    Args:
        folder: Locked.
        request: All that determines the predictions, JSON-able.
    """

    def __init__(self, folder: pathlib.Path, request: dict, overwrite: bool = False):
        with reading(folder):
            there = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
        for name in there:
            # Without a manifest, the origin of shards is unknown.
            if not name.startswith(".") and not (MANIFEST in there and _OWN.fullmatch(name)):
                raise Refusal(f"--output must be a new folder, or one of stored predictions, and {folder} has {name}; "
                              "name another one.")
        cache_files.begin(folder, MANIFEST, {"format_version": _FORMAT_VERSION, **request}, _OWN, overwrite, reads=[])
        self.manifest = read_manifest(folder)
        self._folder, shards = folder, {}
        for number in shard_numbers(folder):
            try:
                keys, checksum = read_keys(folder, number)
            except BadData:
                continue
            if cache_files.is_unchanged(_files(folder, number)[0], checksum):
                shards[number] = keys
        leftovers.remove_unfinished(folder)
        with writing(folder):
            for file in sorted(folder.iterdir()):
                if _OWN.fullmatch(file.name) and file.name != MANIFEST and int(file.stem) not in shards:
                    remove(file)
        # The empty first key gives each search an index.
        self._keys = np.sort(np.concatenate([np.zeros(1, _KEY), *shards.values()]))
        self._next = max(shards, default=-1) + 1
        self._waiting, self._num_bytes, self._since = {}, 0, time.monotonic()

    def __len__(self):
        return len(self._keys) - 1 + len(self._waiting)

    def lacks(self, keys: np.ndarray) -> np.ndarray:
        """Returns the indices of missing rows, each key once."""
        _, first = np.unique(keys, return_index=True)
        is_there = _find(self._keys, keys) >= 0
        return np.array([index for index in sorted(first) if not is_there[index] and keys[index] not in self._waiting],
                        np.int64)

    def add(self, keys: np.ndarray, rows: list[bytes]) -> None:
        """Adds rows, <bytes16>[rows], and writes a shard if it is due."""
        self._waiting |= dict(zip(keys, rows, strict=True))
        self._num_bytes += sum(map(len, rows))
        if self._num_bytes >= _BYTES_PER_SHARD or time.monotonic() - self._since >= _SECONDS_PER_SHARD:
            self._flush()

    def _flush(self):
        if self._waiting:
            keys, rows = np.array(list(self._waiting), _KEY), list(self._waiting.values())
            of_rows, of_keys, described = _files(self._folder, self._next)
            description = {"rows": len(rows), **write_records(of_rows, rows),
                           "keys_sha256": hashlib.sha256(keys.tobytes()).hexdigest()}
            write_whole(of_keys, keys.tobytes())
            write_whole(described, json.dumps(description))
            self._keys = np.sort(np.concatenate([self._keys, keys]))
            self._next += 1
        self._waiting, self._num_bytes, self._since = {}, 0, time.monotonic()

    def finish(self, read: dict) -> None:
        """Writes the rows in memory, and adds a finished reading of training batches to the manifest."""
        self._flush()
        if read not in self.manifest["reads"]:
            self.manifest["reads"].append(read)
        write_whole(self._folder / MANIFEST, json.dumps(self.manifest, indent=1))
