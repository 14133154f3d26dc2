"""Rows of files (lines, JSON objects, cells between tabs or of CSV) and the texts of their fields."""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from switch_tf import checks
from switch_tf.configs.choices import nearest
from switch_tf.data.byte_lines import LONGEST_LINE, Fault, LongLine
from switch_tf.data.json_arrays import elements
from switch_tf.refusals import first_line

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
