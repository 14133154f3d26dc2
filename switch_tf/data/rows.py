"""Lines of bytes up to a limit of length, from ordinary files.

A line is in memory several times, as bytes, text and tokens. An endless line, such as a file without line ends or a
small .gz that unpacks to a thousand times its size, must be refused before it is read whole.


The elements of a JSON array, read one after another from a file that may be larger than memory.

Rows of files (lines, JSON objects, cells between tabs or of CSV) and the texts of their fields."""

import codecs
import csv
import io
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import tensorflow as tf

from switch_tf import checks
from switch_tf.configs.choices import nearest
from switch_tf.refusals import first_line

LONGEST_LINE = 2**24  # bytes
_BLOCK = 2**16  # bytes of a line that is skipped
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
          (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))


class Fault(Exception):
    """The reason why a row or file cannot be used, without a full stop."""


class LongLine(Fault):
    """A line that is longer than `LONGEST_LINE`. Its `size` bytes were skipped."""

    def __init__(self, size: int):
        super().__init__(f"it has {size:,} bytes, and a line may have {LONGEST_LINE:,} at most")
        self.size = size


class ByteLines:
    """An iterator over the lines of a binary stream, with their ends. It can continue after a `LongLine`.

    `left`: int or None, the number of bytes still to be read.

    Args:
        stream: Binary stream with `readline(size)`.
        size: int or None. Bytes to read. None reads to the end.
    """

    def __init__(self, stream: BinaryIO, size: int | None = None):
        self._stream, self.left = stream, size

    def __iter__(self):
        return self

    def __next__(self) -> bytes:
        most = LONGEST_LINE + 1 if self.left is None else min(LONGEST_LINE + 1, self.left)
        line = self._stream.readline(most)
        if not line:
            raise StopIteration
        size = len(line)
        if size > LONGEST_LINE and not line.endswith(b"\n"):
            size += skip_line(self._stream)
        if self.left is not None:
            self.left = max(0, self.left - size)  # a last line that has grown may continue beyond the end
        if size > LONGEST_LINE:
            raise LongLine(size)
        return line


def skip_line(stream: BinaryIO) -> int:
    """Reads to the end of a line without keeping it; returns the number of bytes, its end included."""
    size = 0
    while block := stream.readline(_BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def open_bytes(name: str) -> BinaryIO:
    """Opens a file to read bytes at any position, on this machine or, with "://", by TensorFlow.

    Raises:
        Fault: a pipe, a device, a socket, a folder, or a link to nothing.
        OSError: The file cannot be opened.
    """
    if "://" in name:
        return io.BufferedReader(_Remote(tf.io.gfile.GFile(name, "rb")))
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        if words := dangling(name):
            raise Fault(f"there is no such file{words}") from None
        raise
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no ordinary file")
        raise Fault(f"it is {kind}, and files are read more than once and from any place: copy what comes out of "
                    "it to a file, and name that")
    return open(name, "rb")


def dangling(name: str) -> str:
    """Returns the end of a sentence about a missing file that is a link to nothing; "" for any other name."""
    return f", only a link to {os.readlink(name)!r}, which is not there" if os.path.islink(name) else ""


class _Remote(io.RawIOBase):
    """TensorFlow's file as a raw stream, because its `readline` takes no limit."""

    def __init__(self, file):
        self._file = file

    def readable(self):
        return True

    def seekable(self):
        return True

    def readinto(self, buffer):
        content = self._file.read(len(buffer))
        buffer[:len(content)] = content
        return len(content)

    def seek(self, offset, whence=io.SEEK_SET):
        if whence == io.SEEK_END:
            offset += self._file.size()
        elif whence == io.SEEK_CUR:
            offset += self._file.tell()
        self._file.seek(offset)
        return offset

    def tell(self):
        return self._file.tell()

    def close(self):
        self._file.close()
        super().close()


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


KINDS = {".txt": "lines", ".jsonl": "json", ".json": "json", ".tsv": "tsv", ".csv": "csv"}
# Documents may exceed csv's default. A cell beyond this limit follows a quotation mark that is not closed.
_LONGEST_CELL = 2**24  # characters
_MARK = "\ufeff"  # byte order mark: at the beginning of a file, or within it if files were concatenated
_LONE_RETURN = ("it has a carriage return that ends no line, as in files with the line ends of classic Mac OS; lines "
                "must end with \\n or \\r\\n; convert it with: tr '\\r' '\\n' < FILE > NEW_FILE")


class Example(NamedTuple):
    """One row of a file.

    `texts`: tuple of str, one for each field. None for a row that is empty or cannot be used.
    `fault`: str. The reason why the row cannot be used, without a full stop, "" for any other row.
    `line`: int. The first line of the row, counted from 1 where reading began.
    `end`: int. Bytes from the beginning of reading to the end of the row.
    `raw`: bytes of the row if `texts` is None.
    """

    texts: tuple[str, ...] | None
    fault: str
    line: int
    end: int
    raw: bytes = b""


class Rows:
    """A parser of rows of one kind.

    Args:
        kind: str. One of the values of `KINDS`, or "array" for a JSON array.
        fields: Keys of JSON objects, columns of a table with a header, or column numbers from 0 without one.

    Raises:
        Fault: Files of this kind have no such fields.
    """

    def __init__(self, kind: str, fields: Sequence[str | int]):
        self._kind, self._fields = kind, tuple(fields)
        self._is_table = kind in ("tsv", "csv")
        numbers = [field for field in self._fields if isinstance(field, int) and not isinstance(field, bool)]
        if kind == "lines" and len(self._fields) > 1:
            raise Fault(f"it has one text a line, but {len(self._fields)} fields are asked for "
                        f"({', '.join(map(str, self._fields))}); use .jsonl, .tsv or .csv files")
        are_names = all(isinstance(field, str) for field in self._fields)
        if not are_names and not (self._is_table and len(numbers) == len(self._fields) and min(numbers) >= 0):
            allowed = "names of its header, or numbers of columns from 0" if self._is_table else "names"
            raise Fault(f"its fields must be {allowed}, not {', '.join(map(checks.shown, self._fields))}")
        self.has_header = self._is_table and are_names
        self._header: list[str] | None = None
        self._columns: Sequence[str | int] = self._fields

    def take_header(self, first: bytes, others: Iterable[bytes]) -> int:
        """Finds the columns in the header; returns its size in bytes.

        Raises:
            Fault: The header is missing or lacks a column. The message is a whole sentence.
        """
        if not first.strip():
            raise Fault("there is no header with the names of the columns.")
        lines = _Lines(itertools.chain([first], others))
        try:
            self._header = next(self._split(lines))
        except (UnicodeDecodeError, csv.Error) as error:
            raise Fault(f"{_LONE_RETURN}." if _is_about_a_return(error) else f"the header cannot be read ({error})."
                        ) from error
        if self._kind == "tsv" and any("\r" in name for name in self._header):
            raise Fault(f"{_LONE_RETURN}.")
        for field in self._fields:
            if field not in self._header:
                raise Fault(f"the header has no column {field!r}, only {_some(self._header)}; a table without a header "
                            f"has numbers of columns from 0.{nearest(field, self._header)}")
        self._columns = [self._header.index(str(field)) for field in self._fields]
        return lines.bytes

    def read(self, lines: Iterable[bytes]) -> Iterator[Example]:
        """Yields an Example for each row, empty rows included.

        Args:
            lines: Lines of bytes with their ends, from the beginning of a row. For an array, blocks of bytes from the
                beginning of an element.

        Raises:
            BrokenArray: The rest of an array cannot be read.
        """
        if self._kind == "array":
            yield from self._read_array(lines)
            return
        read = _Lines(lines)
        rows = self._split(read)
        while True:
            line, texts, fault = read.count + 1, None, ""
            read.begin_row()
            try:
                row = next(rows)
                texts = self._texts_of(row)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                fault = f"it is not UTF-8 (byte 0x{error.object[error.start]:02x} after {error.start} others)"
            except csv.Error as error:
                fault = _LONE_RETURN if _is_about_a_return(error) else (
                    f"it is no CSV ({error}): a quotation mark is not closed, or not doubled within a cell")
            except Fault as error:
                fault = str(error)
            yield Example(texts, fault, line, read.bytes, b"" if texts else b"".join(read.row))

    def _read_array(self, chunks):
        for value, text, line, end in elements(chunks):
            try:
                yield Example(self._texts_of_object(value), "", line, end)
            except Fault as error:
                yield Example(None, str(error), line, end, text.encode(errors="replace"))

    def _split(self, lines):
        if self._kind == "csv":
            csv.field_size_limit(_LONGEST_CELL)
            return csv.reader(lines, strict=True)
        return _Cells(lines) if self._kind == "tsv" else lines

    def _texts_of(self, row):
        """Returns the texts of a line or of a row of cells, None if it is empty."""
        if self._kind == "lines":
            text = row.rstrip("\r\n")
            if "\r" in text:
                raise Fault(_LONE_RETURN)
            return (text,) if text.strip() else None
        if self._kind == "json":
            return self._texts_of_json(row) if row.strip() else None
        if not row:
            return None
        if self._kind == "tsv" and any("\r" in cell for cell in row):
            raise Fault(_LONE_RETURN)
        columns = len(self._header) if self._header else max(self._columns) + 1
        if len(row) < columns or (self._header and len(row) > columns):
            expected = f"{columns}, as the header has" if self._header else f"at least {columns}"
            raise Fault(f"it has {len(row)} column{'s' * (len(row) > 1)} and needs {expected}")
        return tuple(row[column] for column in self._columns)

    def _texts_of_json(self, row):
        try:
            example = json.loads(row.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            if "\r" in row.rstrip("\r\n"):
                raise Fault(_LONE_RETURN) from error
            raise Fault(f"it is no JSON ({error.msg}, column {error.colno}), and a line is one whole object"
                         ) from error
        except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
            raise Fault(f"it is no JSON that can be read ({first_line(error)})") from error
        return self._texts_of_object(example)

    def _texts_of_object(self, example):
        if not isinstance(example, dict):
            raise Fault(f"it must be an object such as {json.dumps({self._fields[0]: '...'})}, not "
                         f"{checks.shown(example)}")
        for field in self._fields:
            if field not in example:
                raise Fault(f"it has no field {field!r}, {f'only {_some(example)}' if example else 'nor any other'}")
            if not isinstance(example[field], str):
                raise Fault(f"the field {field!r} must be text, not {checks.shown(example[field])}")
            if not example[field].isascii():
                _check_encodable(field, example[field])
        return tuple(example[field] for field in self._fields)


class _Lines:
    """An iterator that decodes and counts lines of bytes. Unlike a generator, it continues after an exception."""

    def __init__(self, lines):
        self._lines = iter(lines)
        self.count = self.bytes = self._row_start = 0
        self.row = []

    def __iter__(self):
        return self

    def begin_row(self):
        """Starts a new row and collects its lines in `row`."""
        self._row_start, self.row = self.bytes, []

    def __next__(self):
        try:
            line = next(self._lines)
        except LongLine as error:
            self.count += 1
            self.bytes += error.size
            raise
        self.count += 1
        self.bytes += len(line)
        if self.bytes - self._row_start > LONGEST_LINE:  # a row of CSV with many lines
            raise Fault(f"its row goes on beyond {LONGEST_LINE:,} bytes, the most that a row may have")
        self.row.append(line)
        return line.decode().removeprefix(_MARK)


class _Cells:
    """The cells of lines between tabs, without a meaning of quotation marks."""

    def __init__(self, lines):
        self._lines = lines

    def __iter__(self):
        return self

    def __next__(self):
        line = next(self._lines).rstrip("\r\n")
        return line.split("\t") if line.strip() else []


def _is_about_a_return(error):
    return isinstance(error, csv.Error) and "new-line character" in str(error)


def _check_encodable(field, text):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Fault(f"the field {field!r} has half of a surrogate pair ({text[error.start]!r}), which is no "
                     "character") from error


def _some(names):
    """Returns the first eight names in quotes, and the number of others."""
    names = list(names)
    return ", ".join(map(repr, names[:8])) + f" and {len(names) - 8} more" * (len(names) > 8)
