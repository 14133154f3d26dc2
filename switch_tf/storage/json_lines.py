"""Strict JSON, and files of one object a line that a kill or an editor may have damaged."""

import errno
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.storage import outputs, places
from switch_tf.storage.whole_file import put, reading, writing

_LONGEST = 2**26  # bytes of a line


def dumps(value: Any, **options: Any) -> str:
    """Returns strict JSON: NaN and infinities become null, tuples lists.

    Raises:
        ValueError: The value is nested too deeply.
    """
    try:
        return json.dumps(loads(json.dumps(value)), **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def loads(text: bytes | str, is_strict: bool = False) -> Any:
    """Returns the value of JSON text. NaN and infinities become None, or a ValueError if `is_strict`.

    Raises:
        ValueError: The text is not UTF-8, no JSON, or nested too deeply.
    """
    def constant(name):
        if is_strict:
            raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load(path: Any, largest: int = 2**25, is_strict: bool = False) -> Any:
    """Returns the value of a JSON file.

    Raises:
        ValueError: The path is no regular file, the file exceeds `largest` bytes, or `loads` refuses it.
        OSError: The file does not exist or cannot be read.
    """
    return loads(places.content(path, largest), is_strict)


def append(path: Any, records: Iterable[dict]) -> None:
    """Appends records to a file, after `mend_end`. Writes a bucket's whole file again."""
    added = "".join(dumps(record) + "\n" for record in records).encode()
    with writing(path):
        if not places.is_local(path):
            put(path, (path.read_bytes() if path.is_file() else b"") + added)
            return
        mend_end(path)
        with open(path, "ab") as file:
            file.write(added)


def mend_end(path: pathlib.Path) -> None:
    """Mends a file's last line after a kill: ends a whole record, removes a torn one."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = start = file.seek(0, os.SEEK_END)
        last = b""
        while start and b"\n" not in last:  # a file may be large
            if end - start > _LONGEST:
                raise OSError(errno.EFBIG, "its last line is too long", str(path))
            start = max(0, start - max(2**16, end - start))
            file.seek(start)
            last = file.read(end - start)
        last = last[last.rfind(b"\n") + 1:]
        if not last:
            return
        try:
            loads(last)
            file.write(b"\n")
        except ValueError:
            file.truncate(end - len(last))


def lines(path: Any, shown: Any = None) -> Iterator[bytes]:
    """Yields the lines of a file with their ends. Refuses a line longer than any record.

    Args:
        shown: Path for messages, if the file is a copy.
    """
    shown = shown or path
    if not path.is_file():
        raise Refusal(f"{shown} must be a file of lines, not a folder, a pipe or a device; name another one.")
    # `readline` of a bucket's files takes no limit.
    with reading(shown), path.open("rb") if places.is_local(path) else io.BytesIO(path.read_bytes()) as file:
        while line := file.readline(_LONGEST):
            if len(line) == _LONGEST:
                raise Refusal(f"{shown} has a line of over {_LONGEST // 2**20} MiB, which is no record; remove that "
                              "line, or name another file.")
            yield line


def is_step(value: Any) -> bool:
    """Whether a value is an integer of at least 0, but no bool."""
    return type(value) is int and value >= 0


def read(path: Any,
         is_record: Callable[[dict], bool] = lambda record: True) -> Iterator[tuple[bytes, dict]]:
    """Yields each line that is a record, with the record. Prints a warning about skipped lines.

    A missing file has no lines.
    """
    if not path.is_file():
        return
    bad = []
    for number, line in enumerate(lines(path), 1):
        try:
            record = loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and is_record(record):
            yield line, record
        else:
            bad.append(number)
    if bad:
        outputs.say(f"{path}: skipped {len(bad)} unreadable line{'s' * (len(bad) > 1)} "
                       f"(line {', '.join(map(str, bad[:5]))}{', ...' * (len(bad) > 5)}).")
