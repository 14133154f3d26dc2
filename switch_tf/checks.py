"""Checks of values. Each function returns the value to keep or raises a Refusal of one sentence.

NumPy's integers, floats and booleans become Python's, for JSON. True, False, NaN and infinities are not numbers. Checks
of a tensor cover only what is known while tracing.
"""

import contextlib
import errno
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading

# Words in a refusal -> rule.
_RULES = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in [1e-6, 1e6]": lambda value: 1e-6 <= value <= 1e6,
    "above 0": lambda value: value > 0,
    "0 or above": lambda value: value >= 0,
}
_LARGEST_INTEGER = 2**31 - 1
# Outside, a float32 is 0 or infinite, and a quotient or product with it NaN or infinite.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1.2e-38, 3.4e38
_KINDS = {"float": ("float", "bfloat"), "int": ("int", "uint"), "bool": ("bool",),
          "number": ("float", "bfloat", "int", "uint", "bool")}


def integer(name: str, value: Any, at_least: int) -> int:
    """Checks an integer from `at_least` to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < at_least:
        raise Refusal(f"{name} must be an integer of at least {at_least}, not {shown(value)}.")
    if int(value) > _LARGEST_INTEGER:
        raise Refusal(f"{name} must be an integer of at most {_LARGEST_INTEGER}, not {shown(value)}.")
    return int(value)


def ids(name: str, value: Any, count: int | None = None) -> int | tuple[int, ...]:
    """Checks an id in [0, count), or a list or tuple of ids (returned as a tuple)."""
    is_one = not isinstance(value, list | tuple)
    integers = [integer(name if is_one else f"Each id of {name}", id_, 0) for id_ in ([value] if is_one else value)]
    if count is not None and integers and max(integers) >= count:
        raise Refusal(f"{name} must be below {count}, the size of the vocabulary, not {max(integers)}.")
    return integers[0] if is_one else tuple(integers)


def number(name: str, value: Any, rule: str) -> int | float:
    """Checks a finite number by one of _RULES."""
    converted: int | float = math.nan  # violates every rule
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # from a large fractions.Fraction
            converted = int(value) if isinstance(value, numbers.Integral) else float(value)
    if abs(converted) == math.inf or not _RULES[rule](converted):
        raise Refusal(f"{name} must be a number {rule}, not {shown(value)}.")
    if converted and not _SMALLEST_FLOAT <= abs(converted) <= _LARGEST_FLOAT:
        raise Refusal(f"{name} must be a number that float32 can hold, from {_SMALLEST_FLOAT:g} to "
                      f"{_LARGEST_FLOAT:g}, not {shown(value)}.")
    return converted


def flag(name: str, value: Any) -> bool:
    """Checks a bool. Refuses words such as "no": they are true in Python."""
    numpy = sys.modules.get("numpy")  # imported if the value is NumPy's
    if not isinstance(value, bool if numpy is None else (bool, numpy.bool_)):
        raise Refusal(f"{name} must be True or False, not {shown(value)}.")
    return bool(value)


def text(name: str, value: Any) -> str:
    """Checks nonempty text."""
    if not isinstance(value, str) or not value.strip():
        raise Refusal(f"{name} must be text that is not empty, not {shown(value)}.")
    return value


def path(name: str, value: Any) -> Any:
    """Checks a path of this machine or of a bucket, and returns it in the form of `places.at`."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value) or str(value) == "":
        raise Refusal(f"{name} must be a path, not {shown(value)}.")
    return places.at(place(name, value))


def place(name: str, value: Any) -> Any:
    """Checks text or a path for a file or folder of this machine or of a bucket. It need not exist.

    Refuses other URLs (pathlib would turn "s3://b/x" into the local folder "s3:/b/x") and too long names.
    """
    if not isinstance(value, os.PathLike):
        text(name, value)
    if not places.is_supported(value):
        raise Refusal(f"{name} must be a path of this machine or of a bucket, such as gs://bucket/x, not "
                      f"{os.fspath(value)!r}; use one of these, and copy the files if they are elsewhere.")
    if not places.is_local(value):
        if places.OF_PATTERNS & set(os.fspath(value)):
            raise Refusal(f"{name} must have none of * ? [ ] and \\ in a bucket, where TensorFlow takes it for a "
                          f"pattern, not {os.fspath(value)!r}; use another name.")
        return value
    try:
        os.stat(value)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise Refusal(f"{name} must be shorter, as no file can have the name {shown(str(value))}.") from None
        if error.errno == errno.ELOOP:
            raise Refusal(f"{name} must not be a link that leads to itself, as {shown(str(value))} does.") from None
    except ValueError:  # NUL, or characters that the file system cannot encode
        raise Refusal(f"{name} must be a path, not {shown(str(value))}.") from None
    return value


def new_folder(folder: Any) -> None:
    """Refuses a folder that holds files."""
    with reading(folder):
        is_new = not folder.exists() or folder.is_dir() and not any(folder.iterdir())
    if not is_new:
        raise Refusal(f"{folder} must be new or an empty folder, so that nothing is overwritten; name another one.")


def optional(name: str, value: Any, check: Callable[..., Any], *rule: Any) -> Any:
    """Returns None, or `check(name, value, *rule)` for any other value."""
    return None if value is None else check(name, value, *rule)


def lengths(name: str, value: Any) -> dict[str, int]:
    """Checks the numbers of tokens of a sequence, `{"inputs": ..., "targets": ...}`."""
    if not isinstance(value, Mapping) or set(value) != {"inputs", "targets"}:
        raise Refusal(f"{name} must give the tokens of \"inputs\" and \"targets\", such as "
                      f"{{'inputs': 128, 'targets': 29}}, not {shown(value)}.")
    return {feature: integer(f"{name}[{feature!r}]", value[feature], 1) for feature in ("inputs", "targets")}


def fields(record: Any, names: Iterable[str], check: Callable[..., Any], *rule: Any,
           label: Callable[[str], str] = str) -> None:
    """Replaces fields of a frozen dataclass by `check(label(name), value, *rule)`."""
    for name in names:
        object.__setattr__(record, name, check(label(name), getattr(record, name), *rule))


@contextlib.contextmanager
def arguments_of_keras() -> Iterator[None]:
    """Converts Keras' errors about passed-on arguments to Refusals. Only for the call of a Keras constructor."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(first_line(error)) from error


def tensor(name: str, value: Any, kind: str, shape: Sequence[int | None], may_broadcast: bool = False) -> None:
    """Raises a Refusal unless a tensor has a kind and shape.

    Args:
        value: Tensor of any back end, symbolic or not, or NumPy array.
        kind: "float", "int", "bool", or "number" for any of them.
        shape: Length of each dimension, None for any length.
        may_broadcast: Whether a dimension may also be 1.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise Refusal(f"{name} must be <{kind}>{_listed(shape)}, not {shown(value)}.")
    dtype = getattr(value.dtype, "name", value.dtype)
    lengths = tuple(value.shape)
    fits = len(lengths) == len(shape) and all(
        None in (length, wanted) or length == wanted or (may_broadcast and length == 1)
        for length, wanted in zip(lengths, shape, strict=True))
    if not fits or not dtype.startswith(_KINDS[kind]):
        raise Refusal(f"{name} must be <{kind}>{_listed(shape)}, not <{dtype}>{_listed(lengths)}.")


def width(input_shape: Sequence[int | None], rank: int | None = 3) -> int:
    """Returns the last dimension of a layer's inputs, of a required rank or (None) any."""
    shape = tuple(input_shape or ())
    if not shape or rank not in (None, len(shape)) or shape[-1] is None:
        dimensions = "at least one dimension" if rank is None else f"{rank} dimensions"
        raise Refusal(f"inputs must have {dimensions}, the last one of a known length, not the shape "
                      f"{_listed(shape)}.")
    return shape[-1]


def size(name: str, value: Any, at_least: int) -> Any:
    """Checks an integer, or an integer scalar tensor of unknown value."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers.Integral):
        tensor(name, value, "int", ())
        return value
    return integer(name, value, at_least)


def indices(name: str, values: Any, count: int) -> None:
    """Raises a Refusal unless all indices, if known, are in [0, count)."""
    if values is None or not values.size:
        return
    for value in (values.min(), values.max()):
        if not 0 <= value < count:
            raise Refusal(f"{name} must be in [0, {count}), not {value}.")


def shown(value: Any) -> str:
    """Returns `repr(value)` in one line of at most 120 characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 120 else f"{line[:120]}..."


def printable(text: str) -> str:
    """Escapes unprintable characters, as `\\x1b`."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _listed(shape):
    return f"[{', '.join('any' if length is None else str(length) for length in shape)}]"
