"""Tensor files of a Hugging Face folder, opened without reading a tensor, and safetensors files written in parts.

A safetensors file is eight bytes with the length of the header, a JSON header, the values. The reader of the package
fails for float8 and similar dtypes, which numpy lacks, and its `save_file` needs all tensors in memory at once. Here
the header is compared with the file before it is used, and values are written from any place on.
"""

import bisect
import functools
import itertools
import json
import math
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from switch_tf import checks
from switch_tf.conversion import pytorch_bin
from switch_tf.conversion.untrusted_files import (
    DTYPES,
    Tensor,
    bytes_at,
    check_regular,
    is_plain_name,
    parse_object,
    read_object,
    values_at,
)
from switch_tf.refusals import Refusal
from switch_tf.storage import places

WRITTEN_DTYPES = ("float32", "bfloat16")
MAX_SHARD_BYTES = 5 * 10**9
_CODES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS, _MAX_LENGTH = 8, 2**31 - 1
_MAX_NAME = 300  # characters of a tensor's name; T5's have about 60


def open_folder(folder: pathlib.Path) -> dict[str, Tensor]:
    """Opens model.safetensors or pytorch_model.bin of a folder, one file or shards. Returns name -> tensor.

    Names and dtypes are checked before any values are read.
    """
    path = find_file(folder)
    if path is None:
        names = sorted(path.name for path in folder.iterdir())
        raise Refusal(f"{folder} holds neither model.safetensors nor pytorch_model.bin (nor the index of their "
                      f"shards), but {checks.shown(names)}; download one of them into it.")
    open_file = open_safetensors if path.name.startswith("model") else pytorch_bin.open_tensors
    check_regular(path)
    tensors = _open_shards(path, open_file) if path.suffix == ".json" else open_file(path)
    for name, tensor in tensors.items():
        if len(name) > _MAX_NAME:
            raise Refusal(f"The checkpoint has a tensor whose name has {len(name)} characters, {checks.shown(name)}; "
                          "no model has such names.")
        if tensor.dtype not in DTYPES:
            raise Refusal(f"A weight must be float32, float16 or bfloat16, but {name!r} is "
                          f"{checks.shown(tensor.dtype)}; save the checkpoint anew in one of them, or take the "
                          "original of a quantised one.")
    return tensors


def find_file(folder: Any) -> Any | None:
    """Returns the path of the tensors of a folder or of the index of their shards, None if it has neither."""
    names = (name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
    # A broken link is refused, not passed over.
    return next((path for path in map(folder.joinpath, names) if path.exists() or places.is_link(path)), None)


def _open_shards(index, open_file):
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Refusal(f"{index} has no \"weight_map\" that says which file holds which tensor; download it again.")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not is_plain_name(shard) or not (index.parent / shard).is_file():
            raise Refusal(f"{index.name} names the file {checks.shown(shard)}, which is not in {index.parent}; "
                          "download it too.")
        check_regular(index.parent / shard)
        shards[shard] = open_file(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise Refusal(f"{index.name} says that {shard} holds {checks.shown(name)}, but it does not; download "
                          "both again.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a safetensors file without reading a tensor. Returns name -> tensor."""
    def damaged(reason):
        return Refusal(f"{path} is truncated or no safetensors file: {reason}; download it again.")

    num_bytes, length = places.size(path), int.from_bytes(bytes_at(path, 0, 8), "little")
    if num_bytes < 8 or length > num_bytes - 8:
        raise damaged(f"its header of {length} bytes does not fit into {num_bytes}")
    if length > _MAX_HEADER_BYTES:
        raise Refusal(f"{path} has a header of {length} bytes, and at most {_MAX_HEADER_BYTES} are read; save the "
                      "checkpoint in shards.")
    header = parse_object(bytes_at(path, 8, length), path)
    header.pop("__metadata__", None)
    start = 8 + length
    num_bytes -= start
    tensors, ranges = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            is_valid = (isinstance(dtype, str) and len(shape) <= _MAX_DIMENSIONS
                        and all(type(number) is int for number in (*shape, begin, end))
                        and all(0 <= size <= _MAX_LENGTH for size in shape) and 0 <= begin <= end)
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise damaged(f"its header does not describe {checks.shown(name)} as the format asks")
        shape = tuple(shape)
        if end > num_bytes:
            raise damaged(f"{checks.shown(name)} ends at byte {end} of the {num_bytes} that follow the header")
        known = DTYPES.get(_CODES.get(dtype))
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise damaged(f"{checks.shown(name)} of shape {shape} in {dtype} has {end - begin} bytes")
        ranges.append((begin, end, name))
        load = functools.partial(values_at, path, known, start + begin, shape)
        tensors[name] = Tensor(shape, load, dtype=_CODES.get(dtype, dtype))
    # Tensors follow one another without gaps or overlaps.
    last = 0
    for begin, end, name in sorted(ranges):
        if begin != last:
            raise damaged(f"{checks.shown(name)} begins at byte {begin}, where the tensor before it ends at "
                          f"byte {last}")
        last = end
    if last != num_bytes:
        raise damaged(f"its tensors end at byte {last} of the {num_bytes} that follow the header")
    return tensors


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    """Returns the beginning of a safetensors file, up to the values.

    Args:
        shapes: Name -> shape of the tensors of this file, in the order of their values.
        dtype: "float32", "float16" or "bfloat16".
    """
    (code,) = (code for code, known in _CODES.items() if known == dtype)
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Shards:
    """Writes tensors in order as model.safetensors, or as shards of at most MAX_SHARD_BYTES, or of one tensor.

    Args:
        folder: Path of an existing folder.
        shapes: Name -> shape of each tensor, in the order of writing.
        dtype: Name of the dtype on disk, of WRITTEN_DTYPES.
        num_bytes: Bytes of values that are written already. What follows them is removed.

    Attributes:
        num_bytes: Bytes of values that are written.
    """

    def __init__(self, folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32",
                 num_bytes: int = 0):
        self._folder, self._dtype, self.num_bytes = folder, dtype, num_bytes
        self._unsynced: set[pathlib.Path] = set()
        shards: list[dict] = [{}]
        sizes = [0]
        for name, shape in shapes.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            if shards[-1] and sizes[-1] + size > MAX_SHARD_BYTES:
                shards.append({})
                sizes.append(0)
            shards[-1][name] = shape
            sizes[-1] += size
        names = ["model.safetensors"] if len(shards) == 1 else [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        self._shards = dict(zip(names, shards, strict=True))
        self._starts = [0, *itertools.accumulate(sizes)]
        for (name, shard), size, start in zip(self._shards.items(), sizes, self._starts, strict=False):
            if num_bytes > start:
                os.truncate(folder / name, len(header_of(shard, dtype)) + min(size, num_bytes - start))
            else:
                (folder / name).unlink(missing_ok=True)

    def append(self, values: np.ndarray) -> None:
        """Writes the next tensor, or its next rows, rounded to the dtype on disk."""
        values = np.ascontiguousarray(values, DTYPES[self._dtype]).view(np.uint8)
        index = bisect.bisect_right(self._starts, self.num_bytes) - 1
        name, shard = list(self._shards.items())[index]
        with (self._folder / name).open("ab") as file:
            if self.num_bytes == self._starts[index]:
                file.write(header_of(shard, self._dtype))
            file.write(values.data)
        self.num_bytes += values.nbytes
        self._unsynced.add(self._folder / name)

    def sync(self) -> None:
        """Waits until everything that was appended is on disk."""
        for path in self._unsynced:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()

    def finish(self) -> None:
        """Writes the index, if there are several files."""
        if len(self._shards) > 1:
            write_object(self._folder / "model.safetensors.index.json", {
                "metadata": {"total_size": self._starts[-1]},
                "weight_map": {name: file for file, shard in self._shards.items() for name in shard}})


def write_object(path: pathlib.Path, content: dict) -> None:
    """Writes `content` as JSON with sorted keys, and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
