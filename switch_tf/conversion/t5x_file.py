"""The msgpack file `checkpoint` of a T5X checkpoint, read without its arrays.

The file holds a tree: {"version": 3, "optimizer": {"target": ..., "state": ...}}, or {"target": ..., "state": ...} if
Orbax wrote it. "target" has the weights, "state" the optimizer's slots. A leaf is

* an array within the file, in Flax's extension type 1: a msgpack list of shape, name of the dtype and bytes;
* the tensorstore specification of a zarr folder beside the file;
* the text "PLACEHOLDER://NAME", for a zarr folder of that name;
* in "state" also None, for a weight that the optimizer does not train, and a number of steps.

The part that is not asked for is skipped. A file may come from anywhere, so lengths and names are checked.
"""

import mmap
import pathlib
import struct
from typing import Any, NamedTuple

from etils import epy

from switch_tf import checks
from switch_tf.conversion import lfs_pointers
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

with epy.lazy_imports():  # of the extra "t5x"
    import msgpack

FILE = "checkpoint"
STEP = "state/step"
PARTS = {"target": "weights", "state": "an optimizer's state"}
_PLACEHOLDER = "PLACEHOLDER://"
_MAPS, _TEXTS = (*range(0x80, 0x90), 0xde, 0xdf), (*range(0xa0, 0xc0), 0xd9, 0xda, 0xdb)
_EXTENSIONS, _BYTES = {0xc7: ">B", 0xc8: ">H", 0xc9: ">I"}, {0xc4: ">B", 0xc5: ">H", 0xc6: ">I"}
_FIXED_EXTENSIONS = (0xd4, 0xd5, 0xd6, 0xd7, 0xd8)
_ARRAYS = (1, 3)  # Flax's numbers of the extension types of arrays and NumPy's scalars, which are alike
_MAX_DEPTH = 32
_MAX_HEADER = 512  # bytes of an array's shape and dtype
_MAX_VALUE = 4096  # bytes of anything else, such as the parts of a specification


class InlineArray(NamedTuple):
    """An array within the file: the name of its `dtype`, its `shape`, and the place of its values in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Reference(NamedTuple):
    """An array in a zarr `folder` beside the file, or under that name in a database."""

    folder: str


def is_t5x(folder: Any) -> bool:
    """Returns whether a folder, which may be in a bucket, has a file `checkpoint` that begins like a map of msgpack.

    TensorFlow writes a text file of the same name.
    """
    path = folder / FILE
    if not path.is_file():
        return False
    lfs_pointers.check_is_none(path)
    with path.open("rb") as file:
        return file.read(1) in [bytes([byte]) for byte in _MAPS]


def read_leaves(folder: pathlib.Path, part: str = "target") -> dict[str, InlineArray | Reference | int]:
    """Returns the leaves of a part, name -> place of the array. Names are like "target/encoder/encoder_norm/scale".

    Args:
        folder: Path of the checkpoint.
        part: "target" or "state".

    Raises:
        Refusal: the file is truncated, damaged, or holds something else.
    """
    path = folder / FILE
    tree = _read_tree(path, part)
    holder = tree["optimizer"] if isinstance(tree.get("optimizer"), dict) else tree
    if not isinstance(holder.get(part), dict):
        raise Refusal(f"{path} must hold {PARTS[part]} under \"{part}\", as T5X's checkpoints do, and holds "
                      f"{checks.shown(sorted(holder))}.")
    leaves = {name: leaf for name, leaf in _flattened(holder[part], part) if part == "target" or leaf is not None}
    for name, leaf in leaves.items():
        if not isinstance(leaf, InlineArray | Reference) and not (name == STEP and type(leaf) is int):
            raise _damaged(path, f"{checks.shown(name)} is {checks.shown(leaf)} and no array")
    return leaves


def reference_to(folder: Any) -> Reference:
    """Returns the Reference to a folder.

    Raises:
        Refusal: it is no plain name, so it could lead out of the checkpoint. The text is the part of a sentence.
    """
    name = folder.removesuffix("/") if isinstance(folder, str) else ""
    if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name) or len(name.encode("utf-8", "replace")) > 255:
        raise Refusal(f"an array is in {checks.shown(folder)}, which is no folder beside the file")
    return Reference(name)


def _damaged(path, reason):
    return Refusal(f"{path} is truncated or no checkpoint of T5X: {reason}; download it again.")


def _flattened(tree, name):
    for key, child in tree.items():
        yield from _flattened(child, f"{name}/{key}") if isinstance(child, dict) else [(f"{name}/{key}", child)]


def _read_tree(path, part):
    with reading(path), path.open("rb") as file:
        if not path.stat().st_size:
            raise _damaged(path, "it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            unpacker = msgpack.Unpacker(data, max_buffer_size=0)  # reads `data` piece by piece
            try:
                tree = _read_node(unpacker, data, 0, skipped=PARTS.keys() - {part})
            except (ValueError, IndexError, struct.error, msgpack.exceptions.UnpackException) as error:
                raise _damaged(path, str(error).rstrip(".") or "it ends too early") from None
            if unpacker.tell() != len(data):
                raise _damaged(path, f"its map ends at byte {unpacker.tell()} of {len(data)}")
    if not isinstance(tree, dict):
        raise _damaged(path, "it holds no map")
    return tree


def _read_node(unpacker, data, depth, skipped):
    """Returns a dict of nodes, the place of an array, or any other value."""
    start = unpacker.tell()
    if data[start] not in _MAPS:
        unpacker.skip()
        return _leaf(data, start, unpacker.tell())
    if depth > _MAX_DEPTH:
        raise Refusal(f"it is nested beyond {_MAX_DEPTH} levels")
    children = {}
    for _ in range(unpacker.read_map_header()):
        if data[unpacker.tell()] not in _TEXTS:
            raise Refusal(f"a key at byte {unpacker.tell()} is no text")
        key = unpacker.unpack()
        if key in children:
            raise Refusal(f"the key {checks.shown(key)} is there twice")
        if key in skipped and depth <= 1:
            unpacker.skip()
        else:
            children[key] = _read_node(unpacker, data, depth + 1, skipped)
    return _reference(children) if {"driver", "kvstore"} <= children.keys() else children


def _leaf(data, start, end):
    if data[start] in _EXTENSIONS:
        (size, code) = struct.unpack_from(f"{_EXTENSIONS[data[start]]}B", data, start + 1)
        if code in _ARRAYS:
            return _inline_array(data, end - size, end)
    elif data[start] in _FIXED_EXTENSIONS and data[start + 1] in _ARRAYS:
        return _inline_array(data, start + 2, end)
    if end - start > _MAX_VALUE:
        return f"a value of {end - start} bytes"
    value = msgpack.unpackb(data[start:end])
    is_placeholder = isinstance(value, str) and value.startswith(_PLACEHOLDER)
    return reference_to(value[len(_PLACEHOLDER):]) if is_placeholder else value


def _inline_array(data, start, end):
    header = msgpack.Unpacker(max_buffer_size=_MAX_HEADER)
    header.feed(data[start:min(end, start + _MAX_HEADER)])
    if header.read_array_header() != 3:
        raise Refusal("an array does not consist of shape, dtype and bytes")
    shape, dtype = header.unpack(), header.unpack()
    place = start + header.tell()
    (num_bytes,) = struct.unpack_from(_BYTES.get(data[place], "0s"), data, place + 1)
    is_valid = isinstance(dtype, str) and isinstance(shape, list) and all(
        type(size) is int and size >= 0 for size in shape) and isinstance(num_bytes, int)
    if not is_valid or place + 1 + struct.calcsize(_BYTES[data[place]]) + num_bytes != end:
        raise Refusal("an array does not consist of shape, dtype and bytes")
    return InlineArray(dtype, tuple(shape), end - num_bytes, num_bytes)


def _reference(specification):
    """Returns the folder that a tensorstore specification names. Before version 0.1.14 the path stood outside."""
    store = specification["kvstore"]
    if specification["driver"] != "zarr" or not isinstance(store, dict):
        raise Refusal(f"an array has the tensorstore driver {checks.shown(specification['driver'])}, and T5X writes "
                      "'zarr'")
    return reference_to(store.get("path", specification.get("path")))
