"""Reads files of unknown origin: regular files, JSON of bounded size and depth, and tensors on demand."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from switch_tf import checks
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading

# The largest published files: mT5's tokenizer.json (16 MB), the index of Switch-C's 120,000 tensors (14 MB).
MAX_BYTES = 64 * 2**20
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_DEPTH = 32
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Tensor(NamedTuple):
    """A tensor in a file, read on demand.

    If it `has_parts`, `load(index)` reads only a part. `dtype` is the name in the file, unless the format checks it
    elsewhere.
    """

    shape: tuple[int, ...]
    load: Callable[..., np.ndarray]
    has_parts: bool = False
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
        """Returns all values as <float32>, exactly."""
        return np.asarray(self.load(), np.float32)

    def reshaped(self, shape: tuple[int, ...]) -> "Tensor":
        """Returns a view of the tensor in another shape."""
        return Tensor(shape, lambda: self.load().reshape(shape))


def keeping_last(load: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Returns a function that keeps the last tensor it read."""
    kept = {}

    def read(name):
        if name not in kept:
            kept.clear()  # the next one needs the memory
            kept[name] = load(name)
        return kept[name]

    return read


def bytes_at(path: Any, start: int, count: int) -> bytes:
    """Returns `count` bytes of a file from `start`, fewer at its end. Fetches only these from a bucket."""
    if not places.is_local(path):
        size = places.size(path)
        return path.read_bytes(slice(min(start, size), min(start + count, size)))
    with reading(path), path.open("rb") as file:
        file.seek(start)
        return file.read(count)


def values_at(path: Any, dtype: np.dtype, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values at a byte of a file, memory-mapped if local."""
    if places.is_local(path):
        return np.memmap(path, dtype, "r", start, shape)
    return np.frombuffer(bytes_at(path, start, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def files_in(folder: Any) -> Iterator[Any]:
    """Yields all files and links in a folder, recursively."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            yield from files_in(entry)
        else:
            yield entry


def is_plain_name(name: str) -> bool:
    """Returns whether a name is a single path component."""
    return (0 < len(name.encode("utf-8", "replace")) <= 255 and not {"/", "\\", "\0"} & set(name)
            and name not in (".", ".."))


def check_regular(path: pathlib.Path) -> None:
    """Refuses pipes, devices and pointers of Git LFS. Links to regular files pass, as in the hub's cache.

    Reading a pipe or a device could block or never end.
    """
    if not path.is_file():
        raise Refusal(f"{path} must be a regular file, not a folder, a pipe, a device or a broken link; download it "
                      "again.")
    if bytes_at(path, 0, len(_LFS_POINTER)) == _LFS_POINTER:
        raise Refusal(f"{path} is a pointer of Git LFS and not the file itself; get it with git lfs pull, or download "
                      "it.")


def content(path: pathlib.Path) -> bytes:
    """Returns the bytes of a regular file of at most MAX_BYTES."""
    check_regular(path)
    text = bytes_at(path, 0, MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise Refusal(f"{path} is larger than the {MAX_BYTES} bytes that are read of such a file; it is not what "
                      "its name says.")
    return text


def read_object(path: pathlib.Path) -> dict:
    """Returns the JSON object in a regular file of at most MAX_BYTES."""
    return parse_object(content(path), path)


def parse_object(text: bytes, path: pathlib.Path) -> dict:
    """Parses a JSON object without duplicate keys. `path` is for messages."""
    too_deep = Refusal(f"{path} is JSON that is nested too deeply to be read, beyond {_MAX_DEPTH} levels; download it "
                       "again.")
    try:
        content = json.loads(text.decode(), object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise Refusal(f"{path} is not JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} must hold a JSON object, not {type(content).__name__}; download it again.")
    # Python parses deeper nesting than it can show or compare.
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)
                 if isinstance(child, dict | list)]
    if level:
        raise too_deep
    return content


def _refuse_duplicates(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise ValueError(f"the key {checks.shown(twice)} is there twice")
    return content
