"""Reads and writes safetensors files: eight bytes with the length of the header, a JSON header, the values.

The reader of the safetensors package fails for float8 and similar dtypes, which numpy lacks, and its `save_file` needs
all tensors in memory at once. Here the header is compared with the file before it is used; `shards.py` writes values.
"""

import functools
import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from switch_tf import checks
from switch_tf.conversion import json_files
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

_MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS, _MAX_LENGTH = 8, 2**31 - 1
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


class StoredTensor(NamedTuple):
    """A tensor in a file. `dtype` is the file's name of it. `load` returns <dtype>[*shape], read-only."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


def open_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Opens a file without reading a tensor. Returns name -> tensor.

    Raises:
        Refusal: the format is another one, or the header contradicts the file.
    """
    with reading(path), path.open("rb") as file:
        num_bytes = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > num_bytes - 8:
            raise _damaged(path, f"its header of {length} bytes does not fit into {num_bytes}")
        if length > _MAX_HEADER_BYTES:
            raise Refusal(f"{path} has a header of {length} bytes, and at most {_MAX_HEADER_BYTES} are read; save "
                          "the checkpoint in shards.")
        header = json_files.parse_object(file.read(length), path)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors, ranges = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _described(name, entry, num_bytes - start, path)
        ranges.append((begin, end, name))
        load = functools.partial(np.memmap, path, _DTYPES.get(dtype), "r", start + begin, shape)
        tensors[name] = StoredTensor(dtype, shape, load)
    _check_ranges(ranges, num_bytes - start, path)
    return tensors


def _described(name, entry, num_bytes, path):
    """Returns `(dtype, shape, begin, end)` of an entry of the header, checked against the `num_bytes` of values."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_valid = (isinstance(dtype, str) and len(shape) <= _MAX_DIMENSIONS
                    and all(type(number) is int for number in (*shape, begin, end))
                    and all(0 <= size <= _MAX_LENGTH for size in shape) and 0 <= begin <= end)
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise _damaged(path, f"its header does not describe {checks.shown(name)} as the format asks")
    if end > num_bytes:
        raise _damaged(path, f"{checks.shown(name)} ends at byte {end} of the {num_bytes} that follow the header")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
        raise _damaged(path, f"{checks.shown(name)} of shape {tuple(shape)} in {dtype} has {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _check_ranges(ranges, num_bytes, path):
    """Checks that tensors follow one another without gaps or overlaps, as the format demands."""
    last = 0
    for begin, end, name in sorted(ranges):
        if begin != last:
            raise _damaged(path, f"{checks.shown(name)} begins at byte {begin}, where the tensor before it ends at "
                                 f"byte {last}")
        last = end
    if last != num_bytes:
        raise _damaged(path, f"its tensors end at byte {last} of the {num_bytes} that follow the header")


def _damaged(path, reason):
    return Refusal(f"{path} is truncated or no safetensors file: {reason}; download it again.")


def header(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> bytes:
    """Returns the beginning of a file, up to the values.

    Args:
        shapes: Name -> shape of the tensors of this file, in the order of their values.
        dtype: float32, float16 or bfloat16.
    """
    (code,) = (code for code, known in _DTYPES.items() if known == dtype)
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + num_bytes([shape], dtype)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def num_bytes(shapes: Iterable[Sequence[int]], dtype: np.dtype) -> int:
    """Counts the bytes of tensors of these shapes."""
    return dtype.itemsize * sum(math.prod(shape) for shape in shapes)
