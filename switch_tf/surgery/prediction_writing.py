"""Writes a folder of stored predictions, shard by shard, so that a command that was killed goes on."""

import hashlib
import json
import pathlib
import re
import time
from typing import Any

import numpy as np

from switch_tf.data import cache_files
from switch_tf.data.cache_files import write_records
from switch_tf.data.example_files import BadData
from switch_tf.refusals import Refusal
from switch_tf.storage import leftovers, places
from switch_tf.storage.whole_file import remove, write_whole, writing
from switch_tf.surgery import prediction_store
from switch_tf.surgery.prediction_rows import KEY_BYTES
from switch_tf.surgery.prediction_store import MANIFEST, DamagedShard, KeyIndex, shard_files

# A shard is written when either is reached. A kill loses what is in memory.
_BYTES_PER_SHARD = 2**28
_SECONDS_PER_SHARD = 60
# Files of such a folder. Hidden ones may stand beside them.
_OWN = re.compile(r"\d{5,}\.(array_record|keys|json)|manifest\.json")


def begin(folder: Any, request: dict, overwrite: bool) -> None:
    """Writes the manifest of a new folder, or compares it with that of an earlier start of the command.

    Args:
        folder: Path, locked.
        request: What the predictions depend on, JSON-able.
        overwrite: Whether to remove what is there first.

    Raises:
        Refusal: the folder has other predictions or other files, or cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(folder.iterdir())
    has_manifest = (folder / MANIFEST).exists()  # nobody knows whose shards without a manifest are
    if others := [file.name for file in there
                  if not file.name.startswith(".") and not (has_manifest and _OWN.fullmatch(file.name))]:
        raise Refusal(f"--output must be a new folder, or one of stored predictions, and {folder} has {others[0]}; "
                      "name another one.")
    if overwrite:
        with writing(folder):
            for file in there:
                if _OWN.fullmatch(file.name):
                    remove(file)
    if overwrite or not (folder / MANIFEST).exists():
        write_whole(folder / MANIFEST, json.dumps({"format_version": prediction_store.FORMAT_VERSION, **request,
                                                   "reads": []}, indent=1))
        return
    manifest = prediction_store.read_manifest(folder)
    if found := cache_files.difference(manifest, json.loads(json.dumps(request))):
        raise Refusal(f"The predictions in {folder} are others: {found}. Give --overwrite to make them anew, or "
                      "another --output.")


def note_read(folder: Any, read: dict) -> None:
    """Adds a finished reading of training batches to the manifest."""
    manifest = prediction_store.read_manifest(folder)
    if read not in manifest["reads"]:
        manifest["reads"].append(read)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))


class PredictionWriter:
    """Adds rows to a folder that `begin` accepted. Shards that are damaged or unfinished are removed first.

    Args:
        folder: Path of the folder.

    Raises:
        Refusal: the folder cannot be read or written.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder, self._index, self._waiting = folder, KeyIndex(), {}
        self._num_bytes, self._since = 0, time.monotonic()
        found = []
        for number in prediction_store.shard_numbers(folder):
            try:
                description, keys = prediction_store.read_keys(folder, number)
                prediction_store.check_rows(folder, number, description)
                found.append((number, keys))
            except (DamagedShard, BadData):
                continue
        kept = {file.name for number, _ in found for file in shard_files(folder, number)} | {MANIFEST}
        leftovers.remove_unfinished(folder)
        with writing(folder):
            for file in sorted(folder.iterdir()):
                if _OWN.fullmatch(file.name) and file.name not in kept:
                    remove(file)
        self._index.add(found)
        self._next = max((number for number, _ in found), default=-1) + 1

    def __len__(self):
        return len(self._index) + len(self._waiting)

    def lacks(self, keys: np.ndarray) -> np.ndarray:
        """Returns the indices of rows that are not there, each key once, <int64>[rows]."""
        _, first = np.unique(keys, return_index=True)
        is_there = self._index.find(keys) >= 0
        return np.array([index for index in sorted(first) if not is_there[index] and keys[index] not in self._waiting],
                        np.int64)

    def add(self, keys: np.ndarray, rows: list[bytes]) -> None:
        """Adds rows, <bytes16>[rows], and writes a shard if it is due."""
        self._waiting |= dict(zip(keys, rows, strict=True))
        self._num_bytes += sum(map(len, rows))
        if self._num_bytes >= _BYTES_PER_SHARD or time.monotonic() - self._since >= _SECONDS_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that are in memory."""
        if self._waiting:
            keys = np.array(list(self._waiting), f"S{KEY_BYTES}")
            self._write(keys, list(self._waiting.values()))
            self._index.add([(self._next, keys)])
            self._next += 1
        self._waiting, self._num_bytes, self._since = {}, 0, time.monotonic()

    def _write(self, keys, rows):
        target, of_keys, described = shard_files(self._folder, self._next)
        description = {"rows": len(rows), **write_records(target, rows),
                       "keys_sha256": hashlib.sha256(keys.tobytes()).hexdigest()}
        write_whole(of_keys, keys.tobytes())
        write_whole(described, json.dumps(description))


def num_bytes(folder: Any) -> int:
    """Returns the size of all files of a folder."""
    return places.tree_size(folder)
