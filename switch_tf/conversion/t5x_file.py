"""Arrays of a T5X checkpoint, opened without reading their values.

T5X's own format has the msgpack file `checkpoint`, which holds a tree: {"version": 3, "optimizer": {"target": ...,
"state": ...}}, or {"target": ..., "state": ...} if Orbax wrote it. "target" has the weights, "state" the optimizer's
slots. A leaf is

* an array within the file, in Flax's extension type 1: a msgpack list of shape, name of the dtype and bytes;
* the tensorstore specification of a zarr folder beside the file;
* the text "PLACEHOLDER://NAME", for a zarr folder of that name;
* in "state" also None, for a weight that the optimizer does not train, and a number of steps.

In Orbax' own format the JSON file `_METADATA`, which T5X writes in `checkpoint_<step>/state`, has the keys of each
array under `tree_metadata`, such as "target", "encoder", "encoder_norm", "scale". The array is in zarr format under the
keys joined by dots, in a folder or in the OCDBT database of the checkpoint.

The part that is not asked for is skipped. A file may come from anywhere, so lengths and names are checked.
"""

import math
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np
from etils import epy

from switch_tf import checks
from switch_tf.conversion.untrusted_files import (
    DTYPES,
    MAX_BYTES,
    Tensor,
    check_no_pointer,
    check_regular,
    is_plain_name,
    read_object,
)
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage.whole_file import reading

with epy.lazy_imports():
    import msgpack  # of the extra "t5x"
    import tensorstore  # takes a fifth of a second

FILE, ORBAX_FILE = "checkpoint", "_METADATA"
STEP = "state/step"
_PARTS = {"target": "weights", "state": "an optimizer's state"}
_CHECKPOINT = re.compile(r"(?:checkpoint_)?([0-9]{1,15})")
_ITEMS = ("state", "default", "items")  # T5X's name, and those of Orbax' checkpoint managers
_DATABASE, _UNMERGED = "manifest.ocdbt", "ocdbt.process_*"
_DESCRIPTIONS = {"zarr": ".zarray", "zarr3": "zarr.json"}
_READ_WHOLE = {*_DESCRIPTIONS.values(), _DATABASE}
_INTEGERS = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}

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
    """Returns whether a folder, which may be in a bucket, is a checkpoint of T5X, in its own format or Orbax'."""
    return _has_msgpack(folder) or _orbax_root(folder) is not None


def _has_msgpack(folder):
    """Returns whether a folder has a file `checkpoint` of msgpack. TensorFlow writes a text file of the same name."""
    path = folder / FILE
    if not path.is_file():
        return False
    check_no_pointer(path)
    with path.open("rb") as file:
        return file.read(1) in [bytes([byte]) for byte in _MAPS]


def _orbax_root(folder):
    """Returns the folder of Orbax' description: a checkpoint, which may be in a bucket, or an item in it; else None."""
    return next((root for root in (folder, *(folder / item for item in _ITEMS)) if (root / ORBAX_FILE).is_file()), None)


def newest_in(folder: Any) -> Any | None:
    """Returns the newest checkpoint in a run folder of T5X or Orbax; None for any other folder."""
    steps = {int(found[1]): entry for entry in (folder.iterdir() if folder.is_dir() else ())
             if (found := _CHECKPOINT.fullmatch(entry.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if is_t5x(steps[step])), None)


def open_arrays(folder: pathlib.Path) -> dict[str, Tensor]:
    """Opens the weights of a checkpoint, name -> tensor. Names are like "target/encoder/encoder_norm/scale"."""
    return _open(folder, "target")


def open_state(folder: pathlib.Path) -> tuple[int, dict[str, Tensor]]:
    """Opens the optimizer's state of a checkpoint: (step, name -> slot).

    Names are like "state/param_states/encoder/encoder_norm/scale/v".
    """
    state = _open(folder, "state")
    step = state.pop(STEP, None)
    value = np.asarray(step.load() if isinstance(step, Tensor) else step)
    if value.dtype.kind != "i" or value.size != 1 or not 0 <= value.item() < 2**31:
        raise Refusal(f"{folder} must hold its number of steps as {STEP!r}, and holds {checks.shown(step)}; "
                      "convert its weights alone, without --with_optimizer.")
    return value.item(), state


def _open(folder, part):
    """Returns name -> Tensor for the arrays of a part, and name -> int for a number."""
    if _has_msgpack(folder):
        leaves, driver = read_leaves(folder, part), "zarr"
    else:
        folder = _orbax_root(folder)
        leaves, driver = _read_orbax(folder / ORBAX_FILE, part)
    largest: dict[str, int] = {}  # size of the largest file in each folder
    for entry in folder.rglob("*"):  # tensorstore would wait for a pipe, and go wherever a link leads
        if entry.is_symlink() or not entry.is_dir():
            check_regular(entry)
            place, size = entry.relative_to(folder).parts[0], entry.stat().st_size
            largest[place] = max(size, largest.get(place, 0))
            if entry.name in _READ_WHOLE and size > MAX_BYTES:
                raise Refusal(f"{entry} is larger than the {MAX_BYTES} bytes that are read of such a file; download it "
                              "again.")
    return {name: leaf if isinstance(leaf, int) else
            _open_inline(folder / FILE, name, leaf) if isinstance(leaf, InlineArray) else
            _open_zarr(folder, leaf.folder, name, driver, largest.get(leaf.folder, 0)) for name, leaf in leaves.items()}


def _open_inline(path, name, array):
    dtype = _checked_dtype(name, array.dtype)
    if math.prod(array.shape) * dtype.itemsize != array.num_bytes:
        raise Refusal(f"{path} is damaged: {name!r} of shape {array.shape} in {array.dtype} has {array.num_bytes} "
                      "bytes; download it again.")
    return Tensor(array.shape, lambda: np.memmap(path, np.uint8, "r", array.offset, (array.num_bytes,)).view(
        dtype).reshape(array.shape))


def _open_zarr(folder, place, name, driver, largest):
    where, root = folder / place, os.path.abspath(folder)  # tensorstore takes no ".."
    store = {"driver": "file", "path": f"{root}/{place}/"}
    if (folder / _DATABASE).is_file():
        where = folder
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "path": f"{place}/"}
    elif parts := sorted(part.name for part in folder.glob(_UNMERGED)):
        raise Refusal(f"{folder} was not saved to its end: its arrays are in {checks.shown(parts)}, which the last "
                      "step of a save merges; take another checkpoint of that run.")
    elif not (where / _DESCRIPTIONS[driver]).is_file():
        raise Refusal(f"The checkpoint lacks {where / _DESCRIPTIONS[driver]}, which describes {name!r}; download that "
                      "folder too.")

    def attempt(call):
        try:
            return call().result()
        except ValueError as error:  # damage, with a long description
            reason = first_line(error).partition(" [")[0]
            raise Refusal(f"{name!r} cannot be read ({reason}); download {where} again.") from error

    # By default tensorstore reads a missing chunk as zeros.
    array = attempt(lambda: tensorstore.open(
        {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}, open=True, read=True))
    _checked_dtype(name, array.dtype.name)
    shape, chunk = tuple(array.shape), array.chunk_layout.write_chunk.shape or ()  # None for a number
    if any(part > max(size, 1) for part, size in zip(chunk, shape, strict=True)):
        raise Refusal(f"{where} is damaged: {name!r} of shape {shape} is in chunks of {tuple(chunk)}; download it "
                      "again.")
    # Compressed or not, a chunk is hardly larger than its values. tensorstore ends the process where memory is short.
    if largest > 2 * math.prod(chunk) * array.dtype.numpy_dtype.itemsize + MAX_BYTES:
        raise Refusal(f"{where} is damaged: a file has {largest} bytes, and a chunk of {name!r} has {math.prod(chunk)} "
                      "numbers; download it again.")
    return Tensor(shape, lambda: attempt(array.read), lambda index: attempt(array[index].read))


def _checked_dtype(name, dtype):
    dtypes = DTYPES | (_INTEGERS if name == STEP else {})
    if dtype not in dtypes:
        raise Refusal(f"A weight must be float32, bfloat16 or float16, but {name!r} is {checks.shown(dtype)}; save the "
                      "checkpoint anew in one of them.")
    return dtypes[dtype]


def _read_orbax(path, part):
    """Returns the leaves of a part, name -> Reference, and the tensorstore driver that reads them."""
    content = read_object(path)
    entries = content.get("tree_metadata")
    leaves = {}
    for entry in entries.values() if isinstance(entries, dict) else [entries]:
        metadata = entry.get("value_metadata") if isinstance(entry, dict) else None
        if isinstance(metadata, dict) and metadata.get("value_type") == "None":
            continue  # the slots of a weight that the optimizer does not train
        try:
            keys = [key["key"] for key in entry["key_metadata"]]
            if not keys or not all(isinstance(key, str) for key in keys):
                raise TypeError("A key must be text.")
            if keys[0] == part:
                leaves["/".join(keys)] = _reference_to(".".join(keys))
        except Refusal as error:
            raise Refusal(f"{path} is damaged: {error}; download it again.") from None
        except (KeyError, TypeError):
            raise Refusal(f"{path} is damaged: an array has no keys, but {checks.shown(entry)}; download it again."
                          ) from None
    if not leaves:
        raise Refusal(f"{path} must describe {_PARTS[part]} under \"{part}\", as T5X's checkpoints do, and "
                      "describes none.")
    return leaves, "zarr3" if content.get("use_zarr3") else "zarr"


def read_leaves(folder: pathlib.Path, part: str) -> dict[str, InlineArray | Reference | int]:
    """Returns the leaves of a part, name -> place of the array. Names are like "target/encoder/encoder_norm/scale".

    Args:
        folder: Path of the checkpoint, with the msgpack file.
        part: "target" or "state".
    """
    path = folder / FILE

    def damaged(reason):
        return Refusal(f"{path} is truncated or no checkpoint of T5X: {reason}; download it again.")

    with reading(path), path.open("rb") as file:
        if not path.stat().st_size:
            raise damaged("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            unpacker = msgpack.Unpacker(data, max_buffer_size=0)  # reads `data` piece by piece
            try:
                tree = _read_node(unpacker, data, 0, skipped=_PARTS.keys() - {part})
            except (ValueError, IndexError, struct.error, msgpack.exceptions.UnpackException) as error:
                raise damaged(str(error).rstrip(".") or "it ends too early") from None
            if unpacker.tell() != len(data):
                raise damaged(f"its map ends at byte {unpacker.tell()} of {len(data)}")
    if not isinstance(tree, dict):
        raise damaged("it holds no map")
    holder = tree["optimizer"] if isinstance(tree.get("optimizer"), dict) else tree
    if not isinstance(holder.get(part), dict):
        raise Refusal(f"{path} must hold {_PARTS[part]} under \"{part}\", as T5X's checkpoints do, and holds "
                      f"{checks.shown(sorted(holder))}.")
    leaves = {name: leaf for name, leaf in _flattened(holder[part], part) if part == "target" or leaf is not None}
    for name, leaf in leaves.items():
        if not isinstance(leaf, InlineArray | Reference) and not (name == STEP and type(leaf) is int):
            raise damaged(f"{checks.shown(name)} is {checks.shown(leaf)} and no array")
    return leaves


def _flattened(tree, name):
    for key, child in tree.items():
        yield from _flattened(child, f"{name}/{key}") if isinstance(child, dict) else [(f"{name}/{key}", child)]


def _read_node(unpacker, data, depth, skipped):
    """Returns a dict of nodes, the place of an array, or any other value.

    The text of a Refusal is half a sentence, which the caller completes.
    """
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
    if not {"driver", "kvstore"} <= children.keys():
        return children
    # A tensorstore specification. Before version 0.1.14 the path stood outside.
    driver, store = children["driver"], children["kvstore"]
    if driver != "zarr" or not isinstance(store, dict):
        raise Refusal(f"an array has the tensorstore driver {checks.shown(driver)}, and T5X writes 'zarr'")
    return _reference_to(store.get("path", children.get("path")))


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
    return _reference_to(value[len(_PLACEHOLDER):]) if is_placeholder else value


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


def _reference_to(folder):
    """Returns the Reference to a folder. The text of a Refusal is half a sentence, which the caller completes."""
    name = folder.removesuffix("/") if isinstance(folder, str) else ""
    if not is_plain_name(name):
        raise Refusal(f"an array is in {checks.shown(folder)}, which is no folder beside the file")
    return Reference(name)
