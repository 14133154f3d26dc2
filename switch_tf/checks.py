"""The one place that checks values: each function hands back what may be kept, or refuses it in one sentence.

numpy's integers, floats and booleans are as good as Python's and become those, so that what keeps them can be written
as JSON. True and False are no numbers, nor are NaN and infinities. Of tensors, what is known while tracing is checked.
"""

import errno
import math
import numbers
import os
import pathlib
import re
import sys
from collections.abc import Mapping

from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

# The words of a sentence that refuses a number, and what they mean.
_RULES = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [1e-6, 1e6]": lambda value: 1e-6 <= value <= 1e6,
    "above 0": lambda value: value > 0,
    "0 or above": lambda value: value >= 0,
}
_LARGEST_INTEGER = 2**31 - 1
# Beyond these a float32 is 0 or infinite, and what is divided by it or multiplied with it no number.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1.2e-38, 3.4e38
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib leaves one slash of "gs://b/x", as people do who mistype it
_KINDS = {"float": ("float", "bfloat"), "int": ("int", "uint"), "bool": ("bool",),
          "number": ("float", "bfloat", "int", "uint", "bool")}


def integer(name: str, value, at_least: int) -> int:
    """An integer that is large enough, and small enough for the sizes and seeds of tensors."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise Refusal(f"{name} must be an integer of at least {at_least}, not {shown(value)}.")
    if value > _LARGEST_INTEGER:
        raise Refusal(f"{name} must be an integer of at most {_LARGEST_INTEGER}, not {shown(value)}.")
    return int(value)


def ids(name: str, value) -> int | tuple[int, ...]:
    """Checks one id, or a list or tuple of ids, which is returned as a tuple."""
    if isinstance(value, list | tuple):
        return tuple(integer(f"Each id of {name}", one, 0) for one in value)
    return integer(name, value, 0)


def number(name: str, value, rule: str) -> int | float:
    """A finite number that a rule allows: "in [0, 1)", "in (0, 1)", "in (0, 1]", "in [1e-6, 1e6]", "above 0" or "0 or
    above"."""
    own = _python_number(value)
    if own is None or not _RULES[rule](own):
        raise Refusal(f"{name} must be a number {rule}, not {shown(value)}.")
    if own and not _SMALLEST_FLOAT <= abs(own) <= _LARGEST_FLOAT:
        raise Refusal(f"{name} must be a number that float32 can hold, from {_SMALLEST_FLOAT:g} to "
                      f"{_LARGEST_FLOAT:g}, not {shown(value)}.")
    return own


def _python_number(value) -> int | float | None:
    """An int or a finite float; None for what is neither."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        own = float(value)
    except OverflowError:  # of a fraction; a float of this size would have been infinite
        return None
    return own if math.isfinite(own) else None


def flag(name: str, value) -> bool:
    """True or False; words such as "no", which count as true elsewhere, are refused."""
    numpy = sys.modules.get("numpy")  # whoever has such a value has imported it
    if not isinstance(value, bool if numpy is None else (bool, numpy.bool_)):
        raise Refusal(f"{name} must be True or False, not {shown(value)}.")
    return bool(value)


def text(name: str, value) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise Refusal(f"{name} must be text that is not empty, not {shown(value)}.")
    return value


def path(name: str, value) -> pathlib.Path:
    """A path, given as text or as a path."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value) or str(value) == "":
        raise Refusal(f"{name} must be a path, not {shown(value)}.")
    return pathlib.Path(local(name, value))


def local(name: str, value):
    """Checks text or a path that must name a file of this machine.

    A URL does not: pathlib would turn "gs://b/x" into the local folder "gs:/b/x". Neither does a name that is too long.
    """
    if not isinstance(value, os.PathLike):
        text(name, value)
    if "://" in str(value) or _URL.match(str(value).lstrip()):
        raise Refusal(f"{name} must be a folder or file of this machine's file system, not {str(value)!r}: URLs, "
                      "such as those of buckets, are not supported here; use a local path and copy the files.")
    try:
        os.stat(value)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise Refusal(f"{name} must be shorter, as no file can have the name {shown(str(value))}.") from None
    except ValueError:  # NUL, or characters that the file system cannot encode
        raise Refusal(f"{name} must be a path, not {shown(str(value))}.") from None
    return value


def new_folder(folder: pathlib.Path) -> None:
    """Refuses a folder that holds something, so that nothing is overwritten."""
    with reading(folder):
        is_new = not folder.exists() or folder.is_dir() and not any(folder.iterdir())
    if not is_new:
        raise Refusal(f"{folder} must be new or an empty folder, so that nothing is overwritten; name another one.")


def optional(name: str, value, check, *rule):
    """None, or what `check(name, value, *rule)` makes of it."""
    return None if value is None else check(name, value, *rule)


def lengths(name: str, value) -> dict[str, int]:
    """The tokens of a sequence of inputs and of one of targets."""
    if not isinstance(value, Mapping) or set(value) != {"inputs", "targets"}:
        raise Refusal(f"{name} must give the tokens of \"inputs\" and \"targets\", such as "
                      f"{{'inputs': 128, 'targets': 29}}, not {shown(value)}.")
    return {feature: integer(f"{name}[{feature!r}]", value[feature], 1) for feature in ("inputs", "targets")}


def fields(record, names, check, *rule) -> None:
    """Puts what `check(name, value, *rule)` makes of them in the place of several fields of a frozen dataclass."""
    for name in names:
        object.__setattr__(record, name, check(name, getattr(record, name), *rule))


def tensor(name: str, value, kind: str, shape, may_broadcast=False) -> None:
    """Refuses a tensor of another kind or shape.

    Args:
        value: tensor of any back end, symbolic or not, or numpy array.
        kind: "float", "int", "bool", or "number" for any of them.
        shape: for each dimension its length, or None where that is any or unknown.
        may_broadcast: bool. Dimensions may also be 1.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise Refusal(f"{name} must be <{kind}>{_listed(shape)}, not {shown(value)}.")
    dtype = getattr(value.dtype, "name", value.dtype)
    lengths = tuple(value.shape)
    fits = len(lengths) == len(shape) and all(
        None in (own, wanted) or own == wanted or (may_broadcast and own == 1)
        for own, wanted in zip(lengths, shape, strict=True))
    if not fits or not dtype.startswith(_KINDS[kind]):
        raise Refusal(f"{name} must be <{kind}>{_listed(shape)}, not <{dtype}>{_listed(lengths)}.")


def width(input_shape, rank: int | None = 3) -> int:
    """The last dimension of what a layer is built for: a tensor of this rank, or of any.

    Args:
        input_shape: tuple of int or None.
    """
    shape = tuple(input_shape or ())
    if not shape or rank not in (None, len(shape)) or shape[-1] is None:
        dimensions = "at least one dimension" if rank is None else f"{rank} dimensions"
        raise Refusal(f"inputs must have {dimensions}, the last one of a known length, not the shape "
                      f"{_listed(shape)}.")
    return shape[-1]


def size(name: str, value, at_least: int):
    """An integer that is large enough, or an integer scalar tensor where it is known only when the graph runs."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers.Integral):
        tensor(name, value, "int", ())
        return value
    return integer(name, value, at_least)


def indices(name: str, values, count: int) -> None:
    """Refuses indices that are not in [0, count).

    Args:
        values: numpy array of ints, or None where they are not known yet.
    """
    if values is None or not values.size:
        return
    for value in (values.min(), values.max()):
        if not 0 <= value < count:
            raise Refusal(f"{name} must be in [0, {count}), not {value}.")


def shown(value) -> str:
    """`repr(value)` in one line that is not too long for a sentence."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 120 else f"{line[:120]}..."


def _listed(shape) -> str:
    return f"[{', '.join('any' if length is None else str(length) for length in shape)}]"
