"""Files that may come from anywhere: regular ones alone, JSON of bounded size and depth, and the tensors in files."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from switch_tf import checks
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

# The largest published files are tokenizer.json of mT5 (16 MB) and the index of Switch-C's 120,000 tensors (14 MB).
MAX_BYTES = 64 * 2**20
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_DEPTH = 32
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Tensor(NamedTuple):
    """A tensor in a file, read on demand.

    `load` returns all of it, which takes no memory before it is used if the file is mapped. `load_part(index)` returns
    a part of one that is larger than a part, None if `load` does no more than that. `dtype` is its name in a Hugging
    Face file. Other formats leave the default, whatever they hold.
    """

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    load_part: Callable[[tuple], np.ndarray] | None = None
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, index: tuple = ()) -> np.ndarray:
        """Returns the values at an index, () for all, as <float32>, exact for every accepted dtype."""
        if index and self.load_part is not None:
            return np.asarray(self.load_part(index), np.float32)
        return np.asarray(self.load()[index], np.float32)


class LastRead:
    """Keeps the tensor that was read last, because its next part is needed soon."""

    def __init__(self):
        self._name, self._values = None, None

    def get(self, name: str, load: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the tensor of a name. `load` reads it, unless it is the last one that was read."""
        if self._name != name:
            self._name = self._values = None  # before the next one takes memory
            self._name, self._values = name, load()
        return self._values


def is_plain_name(name: str) -> bool:
    """Returns whether a name is that of a file or folder, and not a path that could lead out of one."""
    return (0 < len(name.encode("utf-8", "replace")) <= 255 and not {"/", "\\", "\0"} & set(name)
            and name not in (".", ".."))


def check_regular(path: pathlib.Path) -> None:
    """Checks that a path is a regular file or a link to one, as in the cache of the hub, and no pointer of Git LFS.

    Anything else, such as a pipe or a device, could block or never end.
    """
    if not path.is_file():
        raise Refusal(f"{path} must be a regular file, not a folder, a pipe, a device or a broken link; download it "
                      "again.")
    check_no_pointer(path)


def check_no_pointer(path: pathlib.Path) -> None:
    """Checks that a regular file is not the pointer that Git LFS leaves for a file that is not in a clone."""
    with reading(path), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise Refusal(f"{path} is a pointer of Git LFS and not the file itself; get it with git lfs pull, or "
                          "download it.")


def content(path: pathlib.Path) -> bytes:
    """Returns the bytes of a regular file of at most MAX_BYTES."""
    check_regular(path)
    with reading(path), path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise Refusal(f"{path} is larger than the {MAX_BYTES} bytes that are read of such a file; it is not what "
                      "its name says.")
    return text


def read_object(path: pathlib.Path) -> dict:
    """Returns the JSON object in a file of at most MAX_BYTES."""
    return parse_object(content(path), path)


def parse_object(text: bytes, path: pathlib.Path) -> dict:
    """Parses a JSON object without duplicate keys. Errors name the file `path`."""
    too_deep = Refusal(f"{path} is JSON that is nested too deeply to be read, beyond {_MAX_DEPTH} levels; download it "
                       "again.")
    try:
        content = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise Refusal(f"{path} is not JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} must hold a JSON object, not {type(content).__name__}; download it again.")
    # Python can parse nesting that it cannot show or compare without running out of stack.
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)
                 if isinstance(child, dict | list)]
    if level:
        raise too_deep
    return content


def _without_duplicates(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise ValueError(f"the key {checks.shown(twice)} is there twice")
    return content
