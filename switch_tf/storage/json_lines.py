"""Strict JSON, and files of one JSON object a line that a kill, a full disk or an editor may have damaged."""

import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from switch_tf.storage.whole_file import reading, writing


def dumps(value: Any, **options: Any) -> str:
    """Returns strict JSON: NaN and infinities, which JSON lacks, become null.

    Args:
        value: JSON-able; tuples are lists.
        options: of `json.dumps`.
    """
    return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Returns a JSON-able value in which each float that is not finite is replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def loads(text: bytes | str) -> Any:
    """Returns the value of JSON text; NaN and infinities, which older versions wrote, are None.

    Raises:
        ValueError: the text is not UTF-8, no JSON, or nested too deeply.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=lambda name: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load(path: str | pathlib.Path, largest: int) -> Any:
    """Returns the value of a JSON file. Nothing is read from what is not a regular file or is larger than `largest`.

    Args:
        path: of the file.
        largest: int, in bytes.

    Raises:
        ValueError: it is no file, it is larger, or `loads` refuses it.
        OSError: it is not there or cannot be read.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > largest:
        raise ValueError(f"it has {path.stat().st_size} bytes")
    return loads(path.read_bytes())


def append(path: str | pathlib.Path, record: dict) -> None:
    """Adds a record to a file of them; a line that a kill has torn there is ended first, so that it alone is lost.

    Raises:
        Refusal: it cannot be written.
    """
    with writing(path), open(path, "ab+") as file:
        is_torn = False
        if file.tell():
            file.seek(-1, 2)
            is_torn = file.read(1) != b"\n"
        file.write(b"\n" * is_torn + dumps(record).encode() + b"\n")


def is_step(value: Any) -> bool:
    """Whether a value of a file is the number of a step: an integer of at least 0, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read(path: str | pathlib.Path,
         is_record: Callable[[dict], bool] = lambda record: True) -> Iterator[tuple[bytes, dict]]:
    """Yields each line of a file that is a record, and what it holds. The other lines cost a warning on stderr.

    Args:
        path: of the file; none there is an empty one.
        is_record: function of a line's object that says whether the object is a record.

    Raises:
        Refusal: the file cannot be read.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        return
    bad = []
    with reading(path), open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and is_record(record):
                yield line, record
            else:
                bad.append(number)
    if bad:
        print(f"{path}: skipped {len(bad)} unreadable line{'s' * (len(bad) > 1)} "
              f"(line {', '.join(map(str, bad[:5]))}{', ...' * (len(bad) > 5)}).", file=sys.stderr, flush=True)
