"""Writes tensors in order as model.safetensors, or as shards and an index, from any place on."""

import bisect
import itertools
import os
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from switch_tf.conversion import json_files, safetensors_file

MAX_BYTES = 5 * 10**9
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Shards:
    """Files of at most MAX_BYTES, or of one tensor, in a folder.

    Args:
        folder: Path of an existing folder.
        shapes: Name -> shape of each tensor, in the order of writing.
        dtype: Name of the dtype on disk, of DTYPES.
        num_bytes: Bytes of values that are written already. What follows them is removed.

    Attributes:
        num_bytes: Bytes of values that are written.
    """

    def __init__(self, folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32",
                 num_bytes: int = 0):
        self._folder, self._dtype, self.num_bytes = folder, DTYPES[dtype], num_bytes
        self._unsynced: set[int] = set()
        self._shards: list[dict] = [{}]
        sizes = [0]
        for name, shape in shapes.items():
            size = safetensors_file.num_bytes([shape], self._dtype)
            if self._shards[-1] and sizes[-1] + size > MAX_BYTES:
                self._shards.append({})
                sizes.append(0)
            self._shards[-1][name] = shape
            sizes[-1] += size
        self._starts = [0, *itertools.accumulate(sizes)]
        for index, start in enumerate(self._starts[:-1]):
            if num_bytes > start:
                os.truncate(self._path(index), len(self._header(index)) + min(sizes[index], num_bytes - start))
            else:
                self._path(index).unlink(missing_ok=True)

    def append(self, values: np.ndarray) -> None:
        """Writes the next tensor, or its next rows, rounded to the dtype on disk."""
        index = bisect.bisect_right(self._starts, self.num_bytes) - 1
        with self._path(index).open("ab") as file:
            if self.num_bytes == self._starts[index]:
                file.write(self._header(index))
            file.write(np.ascontiguousarray(values, self._dtype).view(np.uint8).data)
        self.num_bytes += values.size * self._dtype.itemsize
        self._unsynced.add(index)

    def sync(self) -> None:
        """Waits until everything that was appended is on disk."""
        for index in self._unsynced:
            with self._path(index).open("rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()

    def finish(self) -> None:
        """Writes the index, if there are several files."""
        if len(self._shards) == 1:
            return
        weight_map = {name: self._path(index).name for index, shard in enumerate(self._shards) for name in shard}
        json_files.write_object(self._folder / "model.safetensors.index.json", {
            "metadata": {"total_size": self._starts[-1]}, "weight_map": weight_map})

    def _path(self, index):
        count = len(self._shards)
        name = "model" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}"
        return self._folder / f"{name}.safetensors"

    def _header(self, index):
        return safetensors_file.header(self._shards[index], self._dtype)
