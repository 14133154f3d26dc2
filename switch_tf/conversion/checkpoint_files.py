"""Opens the tensor files of a Hugging Face folder, and writes safetensors files in parts.

The package safetensors cannot read dtypes that numpy lacks, such as float8, and its `save_file` needs all tensors in
memory.

A file of PyTorch is a zip archive of `data.pkl`, a pickle that describes the tensors, and `data/<key>`, their values. A
pickle may call any function, so the few instructions of `torch.save` are interpreted here on plain values. Any other
instruction or name is refused.
"""

import bisect
import functools
import itertools
import json
import math
import os
import pathlib
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from switch_tf import checks
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
_MAX_NAME = 300  # T5's names have about 60 characters


def open_folder(folder: pathlib.Path) -> dict[str, Tensor]:
    """Opens a folder's model.safetensors or pytorch_model.bin, a file or shards. Returns name -> tensor."""
    path = find_file(folder)
    if path is None:
        names = sorted(path.name for path in folder.iterdir())
        raise Refusal(f"{folder} holds neither model.safetensors nor pytorch_model.bin (nor the index of their "
                      f"shards), but {checks.shown(names)}; download one of them into it.")
    open_file = open_safetensors if path.name.startswith("model") else open_pytorch
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
    """Returns the path of a folder's tensors or their index, if any."""
    names = (name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
    # A broken link counts, and is refused later.
    return next((path for path in map(folder.joinpath, names) if path.exists() or path.is_symlink()), None)


def _open_shards(index, open_file):
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Refusal(f"{index} has no \"weight_map\" that says which file holds which tensor; download it again.")
    shards, tensors = {}, {}
    for name, shard in weight_map.items():
        if shard not in shards:
            if not is_plain_name(shard) or not (index.parent / shard).is_file():
                raise Refusal(f"{index.name} names the file {checks.shown(shard)}, which is not in {index.parent}; "
                              "download it too.")
            check_regular(index.parent / shard)
            shards[shard] = open_file(index.parent / shard)
        if name not in shards[shard]:
            raise Refusal(f"{index.name} says that {shard} holds {checks.shown(name)}, but it does not; download "
                          "both again.")
        tensors[name] = shards[shard][name]
    return tensors


def open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a safetensors file. Returns name -> tensor."""
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
            is_valid = (isinstance(dtype, str) and dtype not in DTYPES and len(shape) <= _MAX_DIMENSIONS
                        and all(type(number) is int for number in (*shape, begin, end))
                        and all(0 <= size <= _MAX_LENGTH for size in shape) and 0 <= begin <= end)
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise damaged(f"its header does not describe {checks.shown(name)} as the format asks")
        shape, kind = tuple(shape), _CODES.get(dtype, dtype)
        if end > num_bytes:
            raise damaged(f"{checks.shown(name)} ends at byte {end} of the {num_bytes} that follow the header")
        known = DTYPES.get(kind)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise damaged(f"{checks.shown(name)} of shape {shape} in {dtype} has {end - begin} bytes")
        ranges.append((begin, end, name))
        load = functools.partial(values_at, path, known, start + begin, shape)
        tensors[name] = Tensor(shape, load, dtype=kind)
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
    """Returns a safetensors file up to the values.

    Args:
        shapes: Name -> shape, in order.
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
    """Writes tensors in order as model.safetensors, or as shards of at most MAX_SHARD_BYTES or a single tensor.

    Args:
        folder: Existing folder.
        shapes: Name -> shape, in order.
        dtype: Of WRITTEN_DTYPES.
        num_bytes: Bytes of values already written. Further ones are removed.
    """

    def __init__(self, folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32",
                 num_bytes: int = 0):
        self._folder, self._dtype, self.num_bytes, self._unsynced = folder, dtype, num_bytes, set()
        shards, self._starts, end = [], [], 0
        for name, shape in shapes.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            if not shards or end + size - self._starts[-1] > MAX_SHARD_BYTES:
                shards.append({})
                self._starts.append(end)
            shards[-1][name] = shape
            end += size
        self._starts.append(end)
        names = ["model.safetensors"] if len(shards) == 1 else [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        self._shards = list(zip(names, shards, strict=True))
        for (name, shard), (start, end) in zip(self._shards, itertools.pairwise(self._starts), strict=True):
            if num_bytes > start:
                os.truncate(folder / name, len(header_of(shard, dtype)) + min(end, num_bytes) - start)
            else:
                (folder / name).unlink(missing_ok=True)

    def append(self, values: np.ndarray) -> None:
        """Writes the next tensor, or its next rows, rounded to the dtype."""
        values = np.ascontiguousarray(values, DTYPES[self._dtype]).view(np.uint8)
        index = bisect.bisect_right(self._starts, self.num_bytes) - 1
        name, shard = self._shards[index]
        with (self._folder / name).open("ab") as file:
            if self.num_bytes == self._starts[index]:
                file.write(header_of(shard, self._dtype))
            file.write(values.data)
        self.num_bytes += values.nbytes
        self._unsynced.add(self._folder / name)

    def sync(self) -> None:
        """Waits until all values are on disk."""
        while self._unsynced:
            with self._unsynced.pop().open("rb") as file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Writes the index if there are several files."""
        if len(self._shards) > 1:
            write_object(self._folder / "model.safetensors.index.json", {
                "metadata": {"total_size": self._starts[-1]},
                "weight_map": {name: file for file, shard in self._shards for name in shard}})


def write_object(path: pathlib.Path, content: dict) -> None:
    """Writes JSON with sorted keys, and waits until it is on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


_STORAGES = {
    "torch DoubleStorage": np.float64, "torch FloatStorage": np.float32, "torch HalfStorage": np.float16,
    "torch BFloat16Storage": ml_dtypes.bfloat16, "torch LongStorage": np.int64, "torch IntStorage": np.int32,
    "torch ShortStorage": np.int16, "torch CharStorage": np.int8, "torch ByteStorage": np.uint8,
    "torch BoolStorage": np.bool_}
_FUNCTIONS = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_tensor_v2": lambda storage, offset, shape, strides, *_: _Tuple(
        (storage, offset, shape, strides)),
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ZIP_HEADER_BYTES = 30
# For 100,000 tensors of about 20 instructions and 200 bytes each.
_MAX_PROGRAM_BYTES, _MAX_INSTRUCTIONS = 32 * 2**20, 2 * 10**6
_MAX_NESTING = 16


def open_pytorch(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a file of `torch.save` since PyTorch 1.6. Returns name -> tensor."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            # torch.save chooses the folder: "archive/data.pkl".
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            if "data.pkl" not in members or any(member.compress_type for member in members.values()):
                raise Refusal(f"{path} is a zip archive, but not one that torch.save wrote: that has an uncompressed "
                              f"data.pkl, this has {checks.shown(sorted(members)[:5])}.")
            if "byteorder" in members and _content(archive, members["byteorder"]) != b"little":
                raise Refusal(f"{path} was saved on a big-endian machine; save it anew on a little-endian one.")
            program = _content(archive, members["data.pkl"])
    except places.BucketError:
        raise
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, struct.error, UnicodeError) as error:
        if str(error) == "File is not a zip file":
            raise Refusal(f"{path} is not a zip archive: it is truncated, or was saved by PyTorch before 1.6; download "
                          "it again, take the model.safetensors of the same model, or save it anew with PyTorch."
                          ) from None
        raise Refusal(f"{path} is damaged ({error}); download it again.") from None
    return {name: _locate(name, description, path, members)
            for name, description in _interpret(program, path).items()}


def _content(archive, member):
    if member.file_size > _MAX_PROGRAM_BYTES:
        raise zipfile.BadZipFile(f"{member.filename} has {member.file_size} bytes, and at most "
                                 f"{_MAX_PROGRAM_BYTES} are read")
    return archive.read(member)


def _locate(name, description, path, members):
    try:
        (_, storage, key, _, _), offset, shape, strides = description
        dtype, member = np.dtype(_STORAGES[_text(storage)]), members[f"data/{_text(key)}"]
        shape, strides = tuple(shape), tuple(strides)
        is_valid = (all(type(number) is int for number in (offset, *shape, *strides))
                    and min(offset, 0, *shape, *strides) >= 0 and 0 not in shape and len(shape) <= _MAX_DIMENSIONS)
        extent = offset + 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        num_elements = max(extent, math.prod(shape))  # a stride of 0 would expand one number to any size
    except (KeyError, TypeError, ValueError):
        raise Refusal(f"{path} holds something under {checks.shown(name)} that is not a tensor; only dictionaries "
                      "of tensors (model.state_dict()) are read.") from None
    # Only the file has the length of the local header before the values.
    start = max(member.header_offset, 0) + _ZIP_HEADER_BYTES
    header = bytes_at(path, start - _ZIP_HEADER_BYTES, _ZIP_HEADER_BYTES)
    if len(header) == _ZIP_HEADER_BYTES:
        start += sum(struct.unpack("<26x2H", header))
    num_bytes = min(member.file_size, path.stat().st_size - start)
    if not is_valid or num_elements * dtype.itemsize > num_bytes:
        raise Refusal(f"{path} is damaged: {checks.shown(name)} of shape {checks.shown(shape)} does not lie within "
                      f"the {max(num_bytes, 0)} bytes that are stored for it; download it again.")

    def load():
        storage = values_at(path, dtype, start, (extent,))
        return np.lib.stride_tricks.as_strided(
            storage[offset:], shape, [stride * dtype.itemsize for stride in strides], writeable=False)

    return Tensor(shape, load, dtype=dtype.name)


def _text(value):
    """Checks a name in the pickle: a lookup would hash nested tuples without a depth limit."""
    if not isinstance(value, str):
        raise TypeError("A name must be text.")
    return value


class _Tuple(tuple):
    """A tuple with its depth, to refuse deep nesting before a recursion."""

    def __init__(self, items):
        self.depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if self.depth > _MAX_NESTING:
            raise ValueError("Tuples in tuples, too many of them.")


def _interpret(program, path):
    """Returns the dictionary of tensors in a pickle.

    Storages stay PyTorch's tuples ("storage", type, key, device, number of elements).
    """
    stack, marks, memo, refused = [], [], {}, None

    def pop(count=None):  # or all above the last mark
        start = marks.pop() if count is None else len(stack) - count
        if start < 0:
            raise IndexError("The stack holds too little.")
        popped = stack[start:]
        del stack[start:]
        return popped

    try:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(program)):
            if number >= _MAX_INSTRUCTIONS:
                raise ValueError("Too many instructions.")
            match instruction.name:
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                    stack.append(argument)
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE" as name:
                    stack.append(name == "NEWTRUE")
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    marks.append(len(stack))
                case "TUPLE" | "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    stack.append(_Tuple(pop(_TUPLES.get(name))))
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM" | "SETITEMS" as name:
                    items = pop(2 if name == "SETITEM" else None)
                    # AttributeError without a dictionary.
                    stack[-1].update(zip(map(_text, items[::2]), items[1::2], strict=True))
                case "GLOBAL":
                    if argument not in _STORAGES and argument not in _FUNCTIONS:
                        refused = f"asks for {argument.replace(' ', '.')}"
                        break
                    stack.append(argument)
                case "REDUCE":
                    function, arguments = pop(2)
                    stack.append(_FUNCTIONS[_text(function)](*arguments))
                case "BUILD":
                    if not isinstance(stack[-2], dict):
                        raise TypeError("State for something that is no dictionary.")
                    pop(1)  # version numbers of a state_dict
                # A storage's description suffices, so BINPERSID leaves it.
                case "PROTO" | "BINPERSID" | "STOP":
                    pass
                case name:
                    refused = f"uses {name}"
                    break
        (result,) = (None,) if refused else stack
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        result = None
    if refused:
        raise Refusal(f"{path} is refused: its pickle {refused}, which no dictionary of tensors needs and which could "
                      "run code; take the model.safetensors of the same model.")
    if not isinstance(result, dict):
        raise Refusal(f"{path} is damaged, or holds something other than a dictionary of tensors "
                      "(model.state_dict()); download it again, or take the model.safetensors of the same model.")
    return result
