"""The elements of a JSON array, read one after another from a file that may be larger than memory."""

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from switch_tf.data.byte_lines import LONGEST_LINE, Fault
from switch_tf.refusals import first_line

_BLANKS = " \t\r\n"
# The error of an incomplete element is at the end of the text that was read, except for an unterminated string.
_LONGEST_WORD = 16  # characters, such as of "-Infinity" or "\\ud83d\\ude00"


class BrokenArray(Fault):
    """An array with an unreadable rest. `line` counts from 1 where reading began. The message has no full stop."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


class Element(NamedTuple):
    """One element: its `value`, its `text`, its first `line`, from 1, and the bytes up to its `end`, comma included."""

    value: Any
    text: str
    line: int
    end: int


class _Text:
    """Text from `place` on, decoded on demand."""

    def __init__(self, chunks):
        self._chunks, self._decoder = iter(chunks), codecs.getincrementaldecoder("utf-8")()
        self.text, self.place = "", 0
        self.line, self.bytes = 1, 0

    def more(self):
        """Decodes the next chunk; returns whether there was one."""
        chunk = next(self._chunks, b"")
        try:
            self.text = self.text[self.place:] + self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise BrokenArray(self.line + self.text.count("\n", self.place), "it is not UTF-8 (byte "
                              f"0x{error.object[error.start]:02x})") from error
        self.place = 0
        return bool(chunk)

    def double(self):
        """Doubles the decoded text; returns whether there was more."""
        wanted = 2 * (len(self.text) - self.place)
        has_more = self.more()
        while has_more and len(self.text) < wanted and self.more():
            pass
        return has_more

    def take(self, end):
        """Returns the text up to `end` and moves there."""
        taken = self.text[self.place:end]
        self.line += taken.count("\n")
        self.bytes += len(taken.encode())
        self.place = end
        return taken

    def next_character(self):
        """Returns the next character that is no blank, "" at the end, and moves before it."""
        while True:
            end = self.place
            while end < len(self.text) and self.text[end] in _BLANKS:
                end += 1
            self.take(end)
            if end < len(self.text):
                return self.text[end]
            if not self.more():
                return ""


def elements(chunks: Iterable[bytes]) -> Iterator[Element]:
    """Yields the elements of an array after its opening bracket, or after an element and its comma.

    Args:
        chunks: Blocks of bytes of any size, none empty.

    Raises:
        BrokenArray: The rest is no array, or does not end with it.
    """
    text, decoder = _Text(chunks), json.JSONDecoder()
    character = text.next_character()
    while character != "]":
        if not character:
            raise BrokenArray(text.line, "the array has no closing bracket")
        line = text.line
        value, end = _value(text, decoder)
        written = text.take(end)
        character = text.next_character()
        if character not in (",", "]", ""):
            raise BrokenArray(text.line, "a comma or a closing bracket is missing after an element of the array")
        if character == ",":
            text.take(text.place + 1)
        yield Element(value, written, line, text.bytes)
        if character == ",":
            character = text.next_character()
            if character == "]":
                raise BrokenArray(text.line, "a comma stands before the array's closing bracket")
    text.take(text.place + 1)
    if text.next_character():
        raise BrokenArray(text.line, "there is more after the array, and a file holds one array or lines of objects")


def _value(text, decoder):
    """Returns the value at the place of a text, and its end."""
    while True:
        try:
            value, end = decoder.raw_decode(text.text, text.place)
            if end < len(text.text) or text.text[end - 1] in '}]"' or not text.double():
                return value, end
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos > len(text.text) - _LONGEST_WORD
            if len(text.text) - text.place > LONGEST_LINE:
                raise BrokenArray(text.line, f"an element of the array goes on beyond {LONGEST_LINE:,} characters"
                                  ) from error
            if not is_cut or not text.double():
                line = text.line + text.text.count("\n", text.place, error.pos)
                raise BrokenArray(line, f"the array is no JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
            raise BrokenArray(text.line, f"the array cannot be read ({first_line(error)})") from error
