"""Rows of files (lines, JSON objects, elements of a JSON array, cells of TSV or CSV) and the texts of their fields.

An overlong line, as in a file without line ends or a .gz that unpacks to a thousand times its size, is refused before
it fills memory.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from switch_tf import checks
from switch_tf.configs.choices import nearest
from switch_tf.refusals import first_line

KINDS = {".txt": "lines", ".jsonl": "json", ".json": "json", ".tsv": "tsv", ".csv": "csv"}
LONGEST_LINE = 2**24  # bytes, or characters of an array's element or a cell
ALL = 2**63 - 1  # bytes to read
BLOCK = 2**16  # bytes to read at a time
# An incomplete element fails at the end of the text, unless a string is unterminated.
_LONGEST_WORD = 16  # characters, such as of "-Infinity" or "\\ud83d\\ude00"
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_MARK = "\ufeff"  # byte order mark, also within concatenated files
_LONE_RETURN = ("it has a carriage return that ends no line, as in files with the line ends of classic Mac OS; lines "
                "must end with \\n or \\r\\n; convert it with: tr '\\r' '\\n' < FILE > NEW_FILE")


class Fault(Exception):
    """Why a row or file cannot be used, without a full stop."""


class BrokenArray(Fault):
    """An array with an unreadable rest. `line` counts from 1 where reading began."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


class Example(NamedTuple):
    """One row of a file.

    `texts`: One for each field. None for an empty or unusable row.
    `fault`: Why the row is unusable, without a full stop, or "".
    `line`: First line of the row, from 1 where reading began.
    `end`: Bytes from there to the end of the row.
    `raw`: The row if `texts` is None.
    """

    texts: tuple[str, ...] | None
    fault: str
    line: int
    end: int
    raw: bytes = b""


def skip_line(stream: BinaryIO) -> int:
    """Skips to the end of a line; returns the number of bytes, end included."""
    size = 0
    while block := stream.readline(BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


class Lines:
    """An iterator over the lines of a stream. Unlike a generator, it continues after an exception.

    `count`, `bytes`: Numbers of lines and bytes read.

    Args:
        stream: Has `readline(size)`.
        size: Bytes to read. A last line that has grown is cut.
    """

    def __init__(self, stream: BinaryIO, size: int = ALL):
        self._stream, self._size = stream, size
        self.count = self.bytes = 0
        self.begin_row()

    def __iter__(self):
        return self

    def begin_row(self) -> None:
        """Starts a new row; its lines are in `row`."""
        self._row_start, self.row = self.bytes, []

    def __next__(self) -> str:
        line = self._stream.readline(max(0, min(LONGEST_LINE + 1, self._size - self.bytes)))
        if not line:
            raise StopIteration
        size = len(line)
        if size > LONGEST_LINE and not line.endswith(b"\n"):
            size += skip_line(self._stream)
        self.count += 1
        self.bytes += size
        if size > LONGEST_LINE:
            raise Fault(f"it has {size:,} bytes, and a line may have {LONGEST_LINE:,} at most")
        if self.bytes - self._row_start > LONGEST_LINE:  # a row of CSV with many lines
            raise Fault(f"its row goes on beyond {LONGEST_LINE:,} bytes, the most that a row may have")
        self.row.append(line)
        return line.decode().removeprefix(_MARK)


class Rows:
    """A parser of rows of one kind.

    Args:
        kind: A value of `KINDS`, or "array" for a JSON array.
        fields: See `example_files.TextFile`.

    Raises:
        Fault: Files of this kind have no such fields.
    """

    def __init__(self, kind: str, fields: Sequence[str | int]):
        self._kind, self._fields = kind, tuple(fields)
        is_table = kind in ("tsv", "csv")
        if kind == "lines" and len(self._fields) > 1:
            raise Fault(f"it has one text a line, but {len(self._fields)} fields are asked for "
                        f"({', '.join(map(str, self._fields))}); use .jsonl, .tsv or .csv files")
        are_names = all(isinstance(field, str) for field in self._fields)
        if not are_names and not (is_table and all(type(field) is int and field >= 0 for field in self._fields)):
            allowed = "names of its header, or numbers of columns from 0" if is_table else "names"
            raise Fault(f"its fields must be {allowed}, not {', '.join(map(checks.shown, self._fields))}")
        self.has_header = is_table and are_names
        self._columns = self._fields
        self._num_columns = 0 if are_names else max(map(int, self._fields)) + 1

    def take_header(self, stream: BinaryIO) -> int:
        """Finds the columns in a stream's header; returns its size in bytes."""
        lines, header = Lines(stream), []
        try:
            header = next(self._split(lines), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise Fault(_LONE_RETURN if "new-line character" in str(error) else f"the header cannot be read ({error})"
                        ) from error
        if not any(name.strip() for name in header):
            raise Fault("there is no header with the names of the columns")
        for field in self._fields:
            if field not in header:
                raise Fault(f"the header has no column {field!r}, only {_some(header)}; a table without a header has "
                            f"numbers of columns from 0.{nearest(field, header)}".removesuffix("."))
        self._columns, self._num_columns = tuple(map(header.index, self._fields)), len(header)
        return lines.bytes

    def read(self, stream: BinaryIO, size: int = ALL) -> Iterator[Example]:
        """Yields an Example for each row of a stream, empty rows included.

        Args:
            stream: Has `readline(size)` and, for an array, `read(size)`.

        Raises:
            BrokenArray: The rest of an array is unreadable.
        """
        if self._kind == "array":
            yield from self._elements(stream)
            return
        lines = Lines(stream, size)
        rows = self._split(lines)
        while True:
            line, texts, fault = lines.count + 1, None, ""
            lines.begin_row()
            try:
                texts = self._texts_of(next(rows))
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                fault = f"it is not UTF-8 (byte 0x{error.object[error.start]:02x} after {error.start} others)"
            except csv.Error as error:
                fault = _LONE_RETURN if "new-line character" in str(error) else (
                    f"it is no CSV ({error}): a quotation mark is not closed, or not doubled within a cell")
            except Fault as error:
                fault = str(error)
            yield Example(texts, fault, line, lines.bytes, b"" if texts else b"".join(lines.row))

    def _split(self, lines):
        if self._kind == "csv":
            csv.field_size_limit(LONGEST_LINE)
            return csv.reader(lines, strict=True)

        def split(line):
            line = line.rstrip("\r\n")
            if self._kind == "json":
                return line
            if "\r" in line:
                raise Fault(_LONE_RETURN)
            if self._kind == "lines":
                return line
            return line.split("\t") if line.strip() else []  # quotation marks have no meaning

        return map(split, lines)  # unlike a generator, it continues after an exception

    def _texts_of(self, row):
        if not row or isinstance(row, str) and not row.strip():
            return None
        if self._kind == "lines":
            return (row,)
        if self._kind == "json":
            try:
                return self._texts_of_object(json.loads(row))
            except json.JSONDecodeError as error:
                raise Fault(_LONE_RETURN if "\r" in row else f"it is no JSON ({error.msg}, column {error.colno}), and "
                            "a line is one whole object") from error
            except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
                raise Fault(f"it is no JSON that can be read ({first_line(error)})") from error
        if len(row) < self._num_columns or (self.has_header and len(row) > self._num_columns):
            expected = f"{self._num_columns}, as the header has" if self.has_header else f"at least {self._num_columns}"
            raise Fault(f"it has {len(row)} column{'s' * (len(row) > 1)} and needs {expected}")
        return tuple(row[column] for column in self._columns)

    def _texts_of_object(self, example):
        if not isinstance(example, dict):
            raise Fault(f"it must be an object such as {json.dumps({self._fields[0]: '...'})}, not "
                        f"{checks.shown(example)}")
        for field in self._fields:
            if field not in example:
                raise Fault(f"it has no field {field!r}, {f'only {_some(example)}' if example else 'nor any other'}")
            if not isinstance(example[field], str):
                raise Fault(f"the field {field!r} must be text, not {checks.shown(example[field])}")
            try:
                example[field].encode()
            except UnicodeEncodeError as error:
                raise Fault(f"the field {field!r} has half of a surrogate pair ({error.object[error.start]!r}), which "
                            "is no character") from error
        return tuple(example[field] for field in self._fields)

    def _elements(self, stream):
        """The stream begins after the opening bracket, or after an element and its comma."""
        text = _Text(stream)
        character = text.next_character()
        while character != "]":
            if not character:
                raise BrokenArray(text.line, "the array has no closing bracket")
            line = text.line
            value, written = text.next_value()
            character = text.next_character()
            if character not in (",", "]", ""):
                raise BrokenArray(text.line, "a comma or a closing bracket is missing after an element of the array")
            if character == ",":
                text.take(text.place + 1)
            try:
                yield Example(self._texts_of_object(value), "", line, text.bytes)
            except Fault as error:
                yield Example(None, str(error), line, text.bytes, written.encode(errors="replace"))
            if character == "," and (character := text.next_character()) == "]":
                raise BrokenArray(text.line, "a comma stands before the array's closing bracket")
        text.take(text.place + 1)
        if text.next_character():
            raise BrokenArray(text.line,
                              "there is more after the array, and a file holds one array or lines of objects")


class _Text:
    """Text of a stream from `place` on, decoded on demand."""

    def __init__(self, stream):
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self.text, self.place, self.line, self.bytes = "", 0, 1, 0

    def more(self):
        """Doubles the text, by at least a block; whether there was more."""
        self.text, self.place = self.text[self.place:], 0
        chunk = self._stream.read(max(BLOCK, len(self.text)))
        try:
            self.text += self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise BrokenArray(self.line + self.text.count("\n"),
                              f"it is not UTF-8 (byte 0x{error.object[error.start]:02x})") from error
        return bool(chunk)

    def take(self, end):
        taken, self.place = self.text[self.place:end], end
        self.line += taken.count("\n")
        self.bytes += len(taken.encode())
        return taken

    def next_character(self):
        """Moves to the next character that is no blank, "" at the end."""
        while True:
            self.take(_BLANKS.match(self.text, self.place).end())
            if self.place < len(self.text) or not self.more():
                return self.text[self.place:self.place + 1]

    def next_value(self):
        """Moves behind the value here; returns it and its text."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.place)
                if end < len(self.text) or self.text[end - 1] in '}]"':
                    return value, self.take(end)
                if not self.more():  # or the number may go on
                    return value, self.take(len(self.text))
            except json.JSONDecodeError as error:
                if len(self.text) - self.place > LONGEST_LINE:
                    raise BrokenArray(self.line, f"an element of the array goes on beyond {LONGEST_LINE:,} characters"
                                      ) from error
                line = self.line + self.text.count("\n", self.place, error.pos)
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_WORD
                if not is_cut or not self.more():
                    raise BrokenArray(line, f"the array is no JSON ({error.msg})") from error
            except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
                raise BrokenArray(self.line, f"the array cannot be read ({first_line(error)})") from error


def _some(names):
    names = list(names)
    return ", ".join(map(repr, names[:8])) + f" and {len(names) - 8} more" * (len(names) > 8)
