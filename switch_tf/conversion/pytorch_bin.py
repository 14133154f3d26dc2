"""Reads the tensors of a `pytorch_model.bin` without PyTorch, and without running code from the file.

The file is a zip archive: `data.pkl`, a pickle that describes the tensors, and `data/<key>`, their values. A pickle is
a program that may call any function, so it is interpreted here: the few instructions that `torch.save` writes for a
dictionary of tensors work on plain values, and any other instruction or name is refused.
"""

import math
import pathlib
import pickletools
import struct
import zipfile
from collections.abc import Callable

import ml_dtypes
import numpy as np

from switch_tf import checks
from switch_tf.conversion.untrusted_files import Tensor, bytes_at, values_at
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

_STORAGES = {
    "torch DoubleStorage": np.float64, "torch FloatStorage": np.float32, "torch HalfStorage": np.float16,
    "torch BFloat16Storage": ml_dtypes.bfloat16, "torch LongStorage": np.int64, "torch IntStorage": np.int32,
    "torch ShortStorage": np.int16, "torch CharStorage": np.int8, "torch ByteStorage": np.uint8,
    "torch BoolStorage": np.bool_}
_FUNCTIONS: dict[str, Callable] = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_tensor_v2": lambda storage, offset, shape, strides, *_: _Tuple(
        (storage, offset, shape, strides)),
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ZIP_HEADER_BYTES = 30
# 100,000 tensors, of about 20 instructions and 200 bytes each.
_MAX_PROGRAM_BYTES, _MAX_INSTRUCTIONS = 32 * 2**20, 2 * 10**6
_MAX_NESTING, _MAX_DIMENSIONS = 16, 8


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a file written by `torch.save` of PyTorch 1.6 or later. Returns name -> tensor."""
    with reading(path), path.open("rb") as file:
        is_zip = zipfile.is_zipfile(file)
    if not is_zip:
        raise Refusal(f"{path} is not a zip archive: it is truncated, or was saved by PyTorch before 1.6; download "
                      "it again, take the model.safetensors of the same model, or save it anew with PyTorch.")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            # torch.save chooses the name of the folder: "archive/data.pkl", "archive/data/0".
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            if "data.pkl" not in members or any(member.compress_type for member in members.values()):
                raise Refusal(f"{path} is a zip archive, but not one that torch.save wrote: that has an uncompressed "
                              f"data.pkl, this has {checks.shown(sorted(members)[:5])}.")
            if "byteorder" in members and _content(archive, members["byteorder"]) != b"little":
                raise Refusal(f"{path} was saved on a big-endian machine; save it anew on a little-endian one.")
            program = _content(archive, members["data.pkl"])
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError, struct.error,
            UnicodeError) as error:
        raise Refusal(f"{path} is damaged ({error}); download it again.") from None
    return {name: _locate(name, description, path, members)
            for name, description in _interpret(program, path).items()}


def _content(archive, member) -> bytes:
    """Returns the bytes of a small member."""
    if member.file_size > _MAX_PROGRAM_BYTES:
        raise zipfile.BadZipFile(f"{member.filename} has {member.file_size} bytes, and at most "
                                 f"{_MAX_PROGRAM_BYTES} are read")
    return archive.read(member)


def _locate(name, description, path, members) -> Tensor:
    """Finds the values of a described tensor in the archive and checks that they are complete."""
    try:
        (_, storage, key, _, _), offset, shape, strides = description
        dtype, member = np.dtype(_STORAGES[_text(storage)]), members[f"data/{_text(key)}"]
        shape, strides = tuple(shape), tuple(strides)
        is_valid = (all(type(number) is int for number in (offset, *shape, *strides))
                    and min(offset, 0, *shape, *strides) >= 0 and 0 not in shape and len(shape) <= _MAX_DIMENSIONS)
        # Elements from the beginning of the storage to the end of the tensor.
        extent = offset + 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        num_elements = max(extent, math.prod(shape))  # a stride of 0 would make a tensor of any size from one number
    except (KeyError, TypeError, ValueError):
        raise Refusal(f"{path} holds something under {checks.shown(name)} that is not a tensor; only dictionaries "
                      "of tensors (model.state_dict()) are read.") from None
    # Values follow the member's local header, whose length stands in the file alone.
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


def _text(value) -> str:
    """Checks a name in the pickle. Looking up a tuple of tuples would hash it, without a limit of depth in C."""
    if not isinstance(value, str):
        raise TypeError("A name must be text.")
    return value


class _Tuple(tuple):
    """A tuple with its depth, so that deep nesting is refused before any recursion."""

    def __init__(self, items):
        self.depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if self.depth > _MAX_NESTING:
            raise ValueError("Tuples in tuples, too many of them.")


def _interpret(program: bytes, path) -> dict:
    """Returns the dictionary of tensors that a pickle describes.

    Names stay text, and storages the tuples of PyTorch: ("storage", type, key, device, number of elements).
    """
    stack, marks, memo, refused = [], [], {}, None

    def pop(count):
        start = len(stack) - count
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
                case "TUPLE":
                    stack.append(_Tuple(pop(len(stack) - marks.pop())))
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    stack.append(_Tuple(pop(_TUPLES[name])))
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM" | "SETITEMS" as name:
                    items = pop(2 if name == "SETITEM" else len(stack) - marks.pop())
                    # AttributeError unless it is a dictionary.
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
                    pop(1)  # the version numbers that a state_dict carries as an attribute
                # BINPERSID replaces the description of a storage by the storage. Only the description is needed here.
                case "PROTO" | "BINPERSID" | "STOP":
                    pass
                case name:
                    refused = f"uses {name}"
                    break
        (result,) = (None,) if refused else stack
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path) from error
    if refused:
        raise Refusal(f"{path} is refused: its pickle {refused}, which no dictionary of tensors needs and which could "
                      "run code; take the model.safetensors of the same model.")
    if not isinstance(result, dict):
        raise _damaged(path)
    return result


def _damaged(path):
    return Refusal(f"{path} is damaged, or holds something other than a dictionary of tensors "
                   "(model.state_dict()); download it again, or take the model.safetensors of the same model.")
