"""Opens the arrays of a T5X checkpoint without reading their values.

T5X's own format has the msgpack file `checkpoint`, a tree {"version": 3, "optimizer": {"target": ..., "state": ...}},
or {"target": ..., "state": ...} if Orbax wrote it. "target" has the weights, "state" the optimizer's slots. A leaf is

* an array within the file, in Flax's extension type 1: a msgpack list of shape, name of the dtype and bytes;
* the tensorstore specification of a zarr folder;
* the text "PLACEHOLDER://NAME", for a zarr folder of that name;
* in "state" also None, for an untrained weight, and a number of steps.

In Orbax' own format the JSON file `_METADATA` has the keys of each array under `tree_metadata`, such as "target",
"encoder", "encoder_norm", "scale". The zarr array is under the keys joined by dots, in a folder or in the checkpoint's
OCDBT database.
"""

import concurrent.futures
import functools
import math
import mmap
import re
from typing import Any

import numpy as np
from etils import epy

from switch_tf import checks
from switch_tf.conversion.untrusted_files import (
    DTYPES,
    MAX_BYTES,
    Tensor,
    bytes_at,
    check_regular,
    files_in,
    is_plain_name,
    read_object,
    values_at,
)
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading

with epy.lazy_imports():
    import msgpack  # of the extra "t5x"
    import tensorstore  # 0.2 s

FILE, ORBAX_FILE = "checkpoint", "_METADATA"
STEP = "state/step"
_PARTS = {"target": "weights", "state": "an optimizer's state"}
_CHECKPOINT = re.compile(r"(?:checkpoint_)?([0-9]{1,15})")
_ITEMS = ("state", "default", "items")  # T5X's name, then names of Orbax' checkpoint managers
_DATABASE, _UNMERGED = "manifest.ocdbt", "ocdbt.process_*"
_DESCRIPTIONS = {"zarr": ".zarray", "zarr3": "zarr.json"}
_OUTAGES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
_READ_WHOLE = {*_DESCRIPTIONS.values(), _DATABASE}
_INTEGERS = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}

_PLACEHOLDER = "PLACEHOLDER://"
_MAPS, _TEXTS = (*range(0x80, 0x90), 0xde, 0xdf), (*range(0xa0, 0xc0), 0xd9, 0xda, 0xdb)
# First byte -> offset of an extension's type, and of bytes.
_EXTENSIONS, _BYTES = {0xc7: 2, 0xc8: 3, 0xc9: 5, **dict.fromkeys(range(0xd4, 0xd9), 1)}, {0xc4: 2, 0xc5: 3, 0xc6: 5}
_ARRAYS = (1, 3)  # Flax's extension types of arrays and NumPy's scalars, encoded alike
_MAX_DEPTH = 32
_MAX_HEADER = 512  # bytes of an array's shape and dtype
_MAX_VALUE = 4096  # bytes of any other value


class Reference(str):
    """The name of an array's zarr folder, or in a database."""


def is_t5x(folder: Any) -> bool:
    """Returns whether a folder is a checkpoint in T5X's or Orbax' format."""
    return _has_msgpack(folder) or _orbax_root(folder) is not None


def _has_msgpack(folder):
    """Returns whether the file `checkpoint` is msgpack, not TensorFlow's text."""
    path = folder / FILE
    if not path.is_file():
        return False
    check_regular(path)
    return any(byte in _MAPS for byte in bytes_at(path, 0, 1))


def _orbax_root(folder):
    """Returns the folder of Orbax' description, or None."""
    return next((root for root in (folder, *(folder / item for item in _ITEMS)) if (root / ORBAX_FILE).is_file()), None)


def newest_in(folder: Any) -> Any | None:
    """Returns the newest checkpoint in a run folder, or None."""
    steps = {int(match[1]): entry for entry in (folder.iterdir() if folder.is_dir() else ())
             if (match := _CHECKPOINT.fullmatch(entry.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if is_t5x(steps[step])), None)


def open_part(folder: Any, part: str) -> dict[str, Any]:
    """Opens "target" or "state".

    Returns:
        Name -> Tensor, or int. Names are such as "target/encoder/encoder_norm/scale" and
        "state/param_states/encoder/encoder_norm/scale/v".
    """
    if _has_msgpack(folder):
        leaves, driver = read_leaves(folder, part), "zarr"
    else:
        folder = _orbax_root(folder)
        leaves, driver = _read_orbax(folder / ORBAX_FILE, part)
    is_database = (folder / _DATABASE).is_file()
    if is_database:
        _largest_file(folder)
    elif parts := sorted(part.name for part in folder.glob(_UNMERGED)):
        raise Refusal(f"{folder} was not saved to its end: its arrays are in {checks.shown(parts)}, which the last "
                      "step of a save merges; take another checkpoint of that run.")

    def opened(name, leaf):
        if isinstance(leaf, Reference):
            return _open_zarr(folder, leaf, name, driver, is_database)
        if isinstance(leaf, Tensor):
            _check_dtype(name, leaf.dtype)
        return leaf

    # A bucket's array takes a dozen requests. Each thread may hold a description of MAX_BYTES.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(leaves, pool.map(opened, leaves, leaves.values()), strict=True))


def _largest_file(folder):
    """Returns the largest file size. Refuses special files: tensorstore follows links and waits for pipes."""
    largest = 0
    for file in files_in(folder):
        check_regular(file)
        largest = max(largest, size := places.size(file))
        if file.name in _READ_WHOLE and size > MAX_BYTES:
            raise Refusal(f"{file} is larger than the {MAX_BYTES} bytes that are read of such a file; download it "
                          "again.")
    return largest


def _open_zarr(folder, place, name, driver, is_database):
    where = folder if is_database else folder / place
    store = places.store_of(where)
    if is_database:
        store = {"driver": "ocdbt", "base": store, "path": f"{place}/"}
    elif not (where / _DESCRIPTIONS[driver]).is_file():
        raise Refusal(f"The checkpoint lacks {where / _DESCRIPTIONS[driver]}, which describes {name!r}; download that "
                      "folder too.")

    def attempt(call):
        try:
            return call().result()
        except ValueError as error:  # damage, with a long message
            reason = first_line(error).partition(" [")[0]
            if not places.is_local(where) and reason.startswith(_OUTAGES):
                raise places.bucket_failure(error, where) from error
            raise Refusal(f"{name!r} cannot be read ({reason}); download {where} again.") from error

    if where.is_symlink() and not is_database:
        check_regular(where)
    largest = 0 if is_database else _largest_file(where)  # before tensorstore opens any file
    # tensorstore would read a missing chunk as zeros.
    array = attempt(lambda: tensorstore.open(
        {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}, open=True, read=True))
    _check_dtype(name, array.dtype.name)
    shape, chunk = tuple(array.shape), array.chunk_layout.write_chunk.shape or ()  # None for a number
    if any(part > max(size, 1) for part, size in zip(chunk, shape, strict=True)):
        raise Refusal(f"{where} is damaged: {name!r} of shape {shape} is in chunks of {tuple(chunk)}; download it "
                      "again.")
    # Even compressed, a chunk is hardly larger than its values. Out of memory, tensorstore ends the process.
    if largest > 2 * math.prod(chunk) * array.dtype.numpy_dtype.itemsize + MAX_BYTES:
        raise Refusal(f"{where} is damaged: a file has {largest} bytes, and a chunk of {name!r} has {math.prod(chunk)} "
                      "numbers; download it again.")
    return Tensor(shape, lambda index=(): attempt(array[index].read), has_parts=True)


def _check_dtype(name, dtype):
    if dtype not in DTYPES and not (name == STEP and dtype in _INTEGERS):
        raise Refusal(f"A weight must be float32, bfloat16 or float16, but {name!r} is {checks.shown(dtype)}; save the "
                      "checkpoint anew in one of them.")


def _read_orbax(path, part):
    """Returns the leaves of a part, name -> Reference, and their tensorstore driver."""
    content = read_object(path)
    entries = content.get("tree_metadata")
    leaves = {}
    for entry in entries.values() if isinstance(entries, dict) else [entries]:
        match entry:
            case {"value_metadata": {"value_type": "None"}}:
                continue  # of an untrained weight
        try:
            keys = [key["key"] for key in entry["key_metadata"]]
            name = ".".join(keys)  # TypeError unless all are text
            if keys[0] == part:
                leaves["/".join(keys)] = _reference_to(name)
        except Refusal as error:
            raise Refusal(f"{path} is damaged: {error}; download it again.") from None
        except (IndexError, KeyError, TypeError):
            raise Refusal(f"{path} is damaged: an array has no keys, but {checks.shown(entry)}; download it again."
                          ) from None
    if not leaves:
        raise Refusal(f"{path} must describe {_PARTS[part]} under \"{part}\", as T5X's checkpoints do, and "
                      "describes none.")
    return leaves, "zarr3" if content.get("use_zarr3") else "zarr"


def read_leaves(folder: Any, part: str) -> dict[str, Tensor | Reference | int]:
    """Returns the leaves of "target" or "state" by names such as "target/encoder/encoder_norm/scale"."""
    path = folder / FILE

    def damaged(reason):
        return Refusal(f"{path} is truncated or no checkpoint of T5X: {reason}; download it again.")

    if not (size := places.size(path)):
        raise damaged("it is empty")
    if places.is_local(path):
        with reading(path), path.open("rb") as file:
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    else:
        data = mmap.mmap(-1, size)
        data[:] = bytes_at(path, 0, size)
    with data:
        unpacker = msgpack.Unpacker(data, max_buffer_size=0)  # reads `data` piece by piece
        try:
            tree = _read_node(path, unpacker, data, 0, skipped=_PARTS.keys() - {part})
        except (ValueError, IndexError, msgpack.exceptions.UnpackException) as error:
            raise damaged(str(error).rstrip(".") or "it ends too early") from None
        if unpacker.tell() != size:
            raise damaged(f"its map ends at byte {unpacker.tell()} of {size}")
    if not isinstance(tree, dict):
        raise damaged("it holds no map")
    holder = tree["optimizer"] if isinstance(tree.get("optimizer"), dict) else tree
    if not isinstance(holder.get(part), dict):
        raise Refusal(f"{path} must hold {_PARTS[part]} under \"{part}\", as T5X's checkpoints do, and holds "
                      f"{checks.shown(sorted(holder))}.")
    leaves = {name: leaf for name, leaf in _flattened(holder[part], part) if part == "target" or leaf is not None}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor | Reference) and not (name == STEP and type(leaf) is int):
            raise damaged(f"{checks.shown(name)} is {checks.shown(leaf)} and no array")
    return leaves


def _flattened(tree, name):
    for key, child in tree.items():
        yield from _flattened(child, f"{name}/{key}") if isinstance(child, dict) else [(f"{name}/{key}", child)]


def _read_node(path, unpacker, data, depth, skipped):
    """Returns a dict of nodes, an array, a Reference, or any other value.

    A Refusal's message is half a sentence for the caller to complete.
    """
    start = unpacker.tell()
    if data[start] not in _MAPS:
        unpacker.skip()
        return _leaf(path, data, start, unpacker.tell())
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
            children[key] = _read_node(path, unpacker, data, depth + 1, skipped)
    if not {"driver", "kvstore"} <= children.keys():
        return children
    # A tensorstore specification. Before 0.1.14 the path was outside of "kvstore".
    driver, store = children["driver"], children["kvstore"]
    if driver != "zarr" or not isinstance(store, dict):
        raise Refusal(f"an array has the tensorstore driver {checks.shown(driver)}, and T5X writes 'zarr'")
    return _reference_to(store.get("path", children.get("path")))


def _leaf(path, data, start, end):
    place = start + _EXTENSIONS.get(data[start], 0)
    if place == start or data[place] not in _ARRAYS:
        if end - start > _MAX_VALUE:
            return f"a value of {end - start} bytes"
        value = msgpack.unpackb(data[start:end])
        is_placeholder = isinstance(value, str) and value.startswith(_PLACEHOLDER)
        return _reference_to(value[len(_PLACEHOLDER):]) if is_placeholder else value
    header, malformed = msgpack.Unpacker(), Refusal("an array does not consist of shape, dtype and bytes")
    header.feed(data[place + 1:min(end, place + 1 + _MAX_HEADER)])
    if header.read_array_header() != 3:
        raise malformed
    shape, dtype = header.unpack(), header.unpack()
    place += 1 + header.tell()
    values = place + _BYTES.get(data[place], 0)
    is_valid = isinstance(dtype, str) and isinstance(shape, list) and all(
        type(size) is int and size >= 0 for size in shape) and values > place
    if not is_valid or int.from_bytes(data[place + 1:values], "big") != end - values:
        raise malformed
    known = (DTYPES | _INTEGERS).get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - values:
        raise Refusal(f"an array of shape {tuple(shape)} in {dtype} has {end - values} bytes")
    return Tensor(tuple(shape), functools.partial(values_at, path, known, values, tuple(shape)), dtype=dtype)


def _reference_to(folder):
    """Returns the Reference to a folder. Refusals are as in `_read_node`."""
    name = folder.removesuffix("/") if isinstance(folder, str) else ""
    if not is_plain_name(name):
        raise Refusal(f"an array is in {checks.shown(folder)}, which is no folder beside the file")
    return Reference(name)
