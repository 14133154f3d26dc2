"""Strict JSON, and files of one JSON object a line that a kill, a full disk or an editor may have damaged."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from switch_tf.storage import places
from switch_tf.storage.whole_file import put, reading, writing


def dumps(value: Any, **options: Any) -> str:
    """Returns strict JSON: NaN and infinities, which JSON lacks, become null.

    Args:
        value: JSON-able value. Tuples become lists.
        options: Options of `json.dumps`.
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


def load(path: str | os.PathLike, largest: int) -> Any:
    """Returns the value of a JSON file. Reads only a regular file of at most `largest` bytes.

    Args:
        path: Path of the file.
        largest: Largest size to read, in bytes.

    Raises:
        ValueError: The path is no regular file, the file is larger, or `loads` refuses it.
        OSError: The file does not exist or cannot be read.
    """
    place = places.at(path)
    if place.exists() and not place.is_file():
        raise ValueError("it is no file")
    if (size := places.size(place)) > largest:
        raise ValueError(f"it has {size} bytes")
    return loads(place.read_bytes())


def append(path: str | os.PathLike, record: dict) -> None:
    """Appends a record to a file. First ends a last line that a kill has cut short, so that only that line is lost.

    In a bucket, which cannot append, the whole file is written again.

    Raises:
        Refusal: it cannot be written.
    """
    with writing(path):
        append_text(path, dumps(record) + "\n")


def append_text(path: str | os.PathLike, lines: str) -> None:
    """Appends whole lines of text to a file as `append` does.

    Raises:
        OSError: It cannot be written.
    """
    place, content = places.at(path), lines.encode()
    if not places.is_local(place):
        put(place, (place.read_bytes() if place.is_file() else b"") + content)
        return
    with open(place, "ab+") as file:
        is_torn = False
        if file.tell():
            file.seek(-1, 2)
            is_torn = file.read(1) != b"\n"
        file.write(b"\n" * is_torn + content)


def is_step(value: Any) -> bool:
    """Returns whether a value read from a file is a step: an integer of at least 0, but no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read(path: str | os.PathLike,
         is_record: Callable[[dict], bool] = lambda record: True) -> Iterator[tuple[bytes, dict]]:
    """Yields each line of a file that is a record, with the record. Prints a warning about the other lines.

    Args:
        path: Path of the file. A missing file has no lines.
        is_record: Function that returns whether the object of a line is a record.

    Raises:
        Refusal: the file cannot be read.
    """
    place = places.at(path)
    if not place.is_file():
        return
    bad = []
    with reading(place), place.open("rb") as lines:
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
