"""Reads the tensors of a `pytorch_model.bin` without PyTorch, and without running code from the file.

The file is a zip archive: `data.pkl`, a pickle that describes the tensors, and `data/<key>`, their values. A pickle is
a program that may call any function, so it is interpreted here: the few instructions that `torch.save` writes for a
dictionary of tensors work on plain values, and any other instruction or name is refused.
"""

import functools
import math
import pathlib
import pickletools
import struct
import zipfile

import ml_dtypes
import numpy as np

from switch_tf import checks
from switch_tf.conversion.safetensors_file import StoredTensor
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

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
_CONSTANTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ZIP_HEADER_BYTES = 30
# 100,000 tensors, of about 20 instructions and 200 bytes each.
_MAX_PROGRAM_BYTES, _MAX_INSTRUCTIONS = 32 * 2**20, 2 * 10**6
_MAX_NESTING, _MAX_DIMENSIONS = 16, 8


def _view(path, dtype, start, offset, shape, strides) -> np.ndarray:
    """Returns a read-only view of a file, <dtype>[*shape].

    `start`: byte where the storage begins. `offset` and `strides`: in elements.
    """
    strides_in_bytes = tuple(stride * np.dtype(dtype).itemsize for stride in strides)
    storage = np.memmap(path, dtype, "r", start, (offset + _extent(shape, strides),))
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, strides_in_bytes, writeable=False)


def _extent(shape, strides) -> int:
    """Counts the elements of a storage from the first to the last element of a tensor."""
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def open_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Opens a file written by `torch.save` of PyTorch 1.6 or later. Returns name -> tensor.

    Raises:
        Refusal: the format is another one, the file is damaged, or its pickle does more than describe tensors.
    """
    with reading(path), path.open("rb") as file:
        is_zip = zipfile.is_zipfile(file)
    if not is_zip:
        raise Refusal(f"{path} is not a zip archive: it is truncated, or was saved by PyTorch before 1.6; download "
                      "it again, take the model.safetensors of the same model, or save it anew with PyTorch.")
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save chooses the name of the folder: "archive/data.pkl", "archive/data/0".
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            program = _program(archive, members, path)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError, struct.error,
            UnicodeError) as error:
        raise Refusal(f"{path} is damaged ({error}); download it again.") from None
    with reading(path), path.open("rb") as file:
        return {name: _locate(name, description, path, members, file)
                for name, description in _read_pickle(program, path).items()}


def _program(archive, members, path) -> bytes:
    """Returns the pickle of an archive written by torch.save."""
    if "data.pkl" not in members or any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise Refusal(f"{path} is a zip archive, but not one that torch.save wrote: that has an uncompressed "
                      f"data.pkl, this has {checks.shown(sorted(members)[:5])}.")
    if "byteorder" in members and _content(archive, members["byteorder"]) != b"little":
        raise Refusal(f"{path} was saved on a big-endian machine; save it anew on a little-endian one.")
    return _content(archive, members["data.pkl"])


def _content(archive, member) -> bytes:
    """Returns the bytes of a small member."""
    if member.file_size > _MAX_PROGRAM_BYTES:
        raise zipfile.BadZipFile(f"{member.filename} has {member.file_size} bytes, and at most "
                                 f"{_MAX_PROGRAM_BYTES} are read")
    return archive.read(member)


def _locate(name, description, path, members, file) -> StoredTensor:
    """Finds the values of a described tensor in the archive and checks that they are complete."""
    try:
        (_, storage, key, _, _), offset, shape, strides = description
        dtype, member = _STORAGES[_text(storage)], members[f"data/{_text(key)}"]
        shape, strides = tuple(shape), tuple(strides)
        is_valid = (all(type(number) is int for number in (offset, *shape, *strides))
                    and min(offset, 0, *shape, *strides) >= 0 and 0 not in shape and len(shape) <= _MAX_DIMENSIONS)
        # A stride of 0 would make a tensor of any size from one number.
        num_elements = max(offset + _extent(shape, strides), math.prod(shape))
    except (KeyError, TypeError, ValueError):
        raise Refusal(f"{path} holds something under {checks.shown(name)} that is not a tensor; only dictionaries "
                      "of tensors (model.state_dict()) are read.") from None
    start = _start(member, file)
    num_bytes = min(member.file_size, path.stat().st_size - start)
    if not is_valid or num_elements * np.dtype(dtype).itemsize > num_bytes:
        raise Refusal(f"{path} is damaged: {checks.shown(name)} of shape {checks.shown(shape)} does not lie within "
                      f"the {max(num_bytes, 0)} bytes that are stored for it; download it again.")
    load = functools.partial(_view, path, dtype, start, offset, shape, strides)
    return StoredTensor(np.dtype(dtype).name, shape, load)


def _start(member, file) -> int:
    """Returns the offset of a member's values. They follow its local header, whose length stands in the file alone."""
    file.seek(max(member.header_offset, 0))
    header = file.read(_ZIP_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack("<26x2H", header) if len(header) == _ZIP_HEADER_BYTES else (0, 0)
    return max(member.header_offset, 0) + _ZIP_HEADER_BYTES + name_bytes + extra_bytes


def _text(value) -> str:
    """Checks a name in the pickle. Looking up a tuple of tuples would hash it, without a limit of depth in C."""
    if not isinstance(value, str):
        raise TypeError("A name must be text.")
    return value


def _read_pickle(program: bytes, path) -> dict:
    """Interprets a pickle that describes a dictionary of tensors."""
    machine = _Machine(path)
    try:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(program)):
            if number >= _MAX_INSTRUCTIONS:
                raise ValueError("Too many instructions.")
            machine.step(instruction.name, argument)
        (result,) = machine.stack
    except Refusal:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path) from error
    if not isinstance(result, dict):
        raise _damaged(path)
    return result


def _damaged(path):
    return Refusal(f"{path} is damaged, or holds something other than a dictionary of tensors "
                   "(model.state_dict()); download it again, or take the model.safetensors of the same model.")


class _Tuple(tuple):
    """A tuple with its depth, so that deep nesting is refused before any recursion."""

    def __init__(self, items):
        self.depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if self.depth > _MAX_NESTING:
            raise ValueError("Tuples in tuples, too many of them.")


class _Machine:
    """A stack machine for the instructions of a pickle that describe tensors.

    Names stay text, and storages the tuples of PyTorch: ("storage", type, key, device, number of elements).
    """

    def __init__(self, path):
        self.path = path
        self.stack, self.marks, self.memo = [], [], {}

    def step(self, instruction, argument):
        stack = self.stack
        if instruction in _CONSTANTS:
            stack.append(argument)
        elif instruction in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction])
        elif instruction in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif instruction in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif instruction == "MARK":
            self.marks.append(len(stack))
        elif instruction == "TUPLE":
            stack.append(_Tuple(self._pop(len(stack) - self.marks.pop())))
        elif instruction in _TUPLES:
            stack.append(_Tuple(self._pop(_TUPLES[instruction])))
        elif instruction == "EMPTY_DICT":
            stack.append({})
        elif instruction in ("SETITEM", "SETITEMS"):
            items = self._pop(2 if instruction == "SETITEM" else len(stack) - self.marks.pop())
            self._dictionary().update(zip(map(_text, items[::2]), items[1::2], strict=True))
        elif instruction == "GLOBAL":
            stack.append(self._name(argument))
        elif instruction == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(_FUNCTIONS[_text(function)](*arguments))
        elif instruction == "BUILD":
            self._pop(1)  # the version numbers that a state_dict carries as an attribute
            self._dictionary()
        elif instruction not in ("PROTO", "BINPERSID", "STOP"):
            # BINPERSID replaces the description of a storage by the storage. Only the description is needed here.
            self._refuse(f"uses {instruction}")

    def _pop(self, count):
        start = len(self.stack) - count
        if start < 0:
            raise IndexError("The stack holds too little.")
        popped = self.stack[start:]
        del self.stack[start:]
        return popped

    def _dictionary(self):
        if not isinstance(self.stack[-1], dict):
            raise TypeError("Items for something that is no dictionary.")
        return self.stack[-1]

    def _name(self, name):
        if name not in _STORAGES and name not in _FUNCTIONS:
            self._refuse(f"asks for {name.replace(' ', '.')}")
        return name

    def _refuse(self, what):
        raise Refusal(f"{self.path} is refused: its pickle {what}, which no dictionary of tensors needs and "
                      "which could run code; take the model.safetensors of the same model.")
