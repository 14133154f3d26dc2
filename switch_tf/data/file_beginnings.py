"""Checks of the beginning of a text file: its encoding, and whether JSON is one object a line or one array."""

import json
from typing import BinaryIO

from switch_tf.data.byte_lines import ByteLines, LongLine
from switch_tf.refusals import Refusal

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD = 2**12  # bytes


def check_is_utf8(name: str, stream: BinaryIO) -> None:
    """Refuses a file of UTF-16 or UTF-32, with or without a byte order mark.

    Raises:
        Refusal: names the file and how to convert it.
    """
    head = stream.read(_HEAD)
    is_marked = head.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff"))
    if is_marked or len(head) / 3 < head.count(0) < 0.9 * len(head):  # a half of UTF-16, three quarters of UTF-32
        why = "begins with the byte order mark of UTF-16 or UTF-32" if is_marked else (
            "has zero bytes between its characters, as UTF-16 has")
        raise Refusal(f"{name} {why}, and text is read as UTF-8; convert it, for example with iconv -f UTF-16 -t "
                      "UTF-8 FILE > NEW_FILE.")


def start_of_array(stream: BinaryIO) -> int:
    """Returns the bytes up to the opening bracket of a JSON array, which it includes; 0 if there is no array."""
    head = stream.read(_HEAD)
    blank = len(head) - len(head.lstrip())
    return blank + 1 if head[blank:blank + 1] == b"[" else 0


def check_objects_are_lines(name: str, stream: BinaryIO) -> None:
    """Refuses a file with a first JSON object that continues in the second line.

    Raises:
        Refusal: names the file and how to make lines of it.
    """
    try:
        lines = (line for line in ByteLines(stream) if line.strip())
        first, second = next(lines, b"").decode().strip(), next(lines, None)
        json.loads(first or "{}")
    except json.JSONDecodeError as error:
        if second is not None and first.startswith("{") and error.pos >= len(first):
            raise Refusal(f"{name}, line 1: a JSON object begins here and goes on in the next line, and each line "
                          "has to be one whole object; jq -c . FILE > NEW_FILE makes such lines.") from error
    except (ValueError, RecursionError, LongLine):  # the faults of a line are reported when it is read
        return
