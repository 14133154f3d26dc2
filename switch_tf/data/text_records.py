"""Examples in files of text: one a line (.txt), JSON objects (.jsonl), rows of tables (.tsv, .csv), each also as .gz.

What cannot be used is told with its file and line. Nothing is kept: a file may be larger than the memory.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from switch_tf import checks
from switch_tf.choices import nearest
from switch_tf.messages import first_line

KINDS = {".txt": "lines", ".jsonl": "json", ".json": "json", ".tsv": "tsv", ".csv": "csv"}
# Read at once, and shuffled as one: 1 MiB is some hundreds of documents, or thousands of short lines.
PIECE = 2**20  # bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A document is longer than csv's own limit; one that exceeds this is what follows a quotation mark that is not closed.
_LONGEST_CELL = 2**24  # characters


class BadData(ValueError):
    """Data that cannot be used: the sentence names file, line and reason (`messages.sentence_about_data`)."""


class _Example(NamedTuple):
    """`texts`: None where it cannot be used, because of `fault`; `line`: its first of those that were read, from 1;
    `end`: how many bytes were read up to its end."""

    texts: tuple[str, ...] | None
    fault: str
    line: int
    end: int


def find_files(name: str, patterns: str | Sequence[str]) -> list[str]:
    """Returns the files of paths and globs, each once.

    Args:
        name: str. What the user calls the argument.
        patterns: path, glob, or a list of them, here or at gs://.

    Raises:
        ValueError: nothing is there, or a folder.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not patterns:
        raise ValueError(f"{name} must be a path, a glob, or a list of them, not {checks.shown(patterns)}.")
    found = []
    for pattern in patterns:
        checks.text(name, pattern)
        try:
            files = [pattern] if tf.io.gfile.exists(pattern) else sorted(tf.io.gfile.glob(pattern))
            folders = [file for file in files if tf.io.gfile.isdir(file)]
        except tf.errors.OpError as error:
            raise ValueError(f"{name} {pattern!r} cannot be looked up: {first_line(error)}.") from error
        if not files:
            raise ValueError(f"{name}: there is no file {pattern!r}; a relative path starts where the command does.")
        if folders:
            inside = f"{folders[0].rstrip('/')}/*.jsonl"
            raise ValueError(f"{name}: {folders[0]!r} is a folder; name its files, for example {inside!r}.")
        found += files
    return list(dict.fromkeys(found))


class TextFile:
    """The examples of one file.

    Args:
        name: str. Its path, whose ending says what it holds.
        fields: keys of JSON objects, or columns of a table by its header, or by numbers from 0 in one that has none. Of
            a .txt file it is one, and the whole line.

    Raises:
        ValueError: another ending, a column that is not there, or what cannot be opened.
    """

    def __init__(self, name: str, fields: Sequence[str | int]):
        self.name = checks.text("The name of a file", name)
        if isinstance(fields, str) or not isinstance(fields, Sequence) or not fields:
            raise ValueError(f"The fields of {name!r} must be a list of names or numbers, not {checks.shown(fields)}.")
        self.fields = tuple(fields)
        self.is_compressed = name.lower().endswith(".gz")
        self._kind = KINDS.get("." + name.lower().removesuffix(".gz").rpartition(".")[2])
        if self._kind is None:
            raise ValueError(f"{name!r} ends in none of {', '.join(KINDS)}, with or without .gz, which say what is in "
                             "a file; rename it.")
        self._check_fields()
        self._header, self._columns = None, ()
        self._start = 0  # where the examples begin, in bytes
        self._place, self._opened_at, self._rest = None, 0, iter(())  # of a packed file that is being read
        self._lock = threading.Lock()
        with self._opened() as stream:
            self._begin(stream)

    def _check_fields(self):
        numbers = [isinstance(field, int) and not isinstance(field, bool) for field in self.fields]
        if self._kind == "lines" and len(self.fields) > 1:
            raise ValueError(f"{self.name!r} has one text a line, but {len(self.fields)} fields are asked for "
                             f"({', '.join(map(str, self.fields))}); use .jsonl, .tsv or .csv files.")
        is_table = self._kind in ("tsv", "csv")
        if any(numbers) and not (is_table and all(numbers) and min(self.fields) >= 0):
            allowed = "names of its header, or numbers of columns from 0" if is_table else "names"
            raise ValueError(f"The fields of {self.name!r} must be {allowed}, not "
                             f"{', '.join(map(checks.shown, self.fields))}.")

    def _begin(self, stream):
        """Finds the columns, and where the examples begin."""
        lines = iter(stream)
        first = next(lines, b"")
        if first.startswith(_BYTE_ORDER_MARK):
            self._start, first = len(_BYTE_ORDER_MARK), first[len(_BYTE_ORDER_MARK):]
        if self._kind not in ("tsv", "csv"):
            return
        self._columns = self.fields
        if isinstance(self.fields[0], int):
            return
        if not first.strip():
            raise ValueError(f"{self.name}, line 1: there is no header with the names of the columns.")
        read = _Lines(itertools.chain([first], lines))
        try:
            self._header = next(self._rows(read))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.name}, line 1: the header cannot be read ({error}).") from error
        self._start += read.bytes
        for field in self.fields:
            if field not in self._header:
                raise ValueError(f"{self.name}, line 1: the header has no column {field!r}, only "
                                 f"{_some(self._header)}.{nearest(field, self._header)} In a table without a header, "
                                 "fields are numbers of columns from 0.")
        self._columns = [self._header.index(field) for field in self.fields]

    @contextlib.contextmanager
    def _opened(self):
        """The file's bytes, unpacked; what the file system or gzip say against it becomes a sentence."""
        try:
            with tf.io.gfile.GFile(self.name, "rb") if "://" in self.name else open(self.name, "rb") as stream:
                yield gzip.GzipFile(fileobj=stream) if self.is_compressed else stream
        except (OSError, EOFError, zlib.error, tf.errors.OpError) as error:
            raise BadData(f"{self.name} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}."
                             ) from error

    def pieces(self) -> list[tuple[int, int]]:
        """Returns from where to where whole examples stand in the file, about `PIECE` bytes each, in order.

        A packed file is one piece that ends at -1, because it can only be read from its beginning on.
        """
        if self.is_compressed:
            return [(self._start, -1)]
        with self._opened() as stream:
            size = stream.size() if "://" in self.name else stream.seek(0, io.SEEK_END)
            cuts = sorted({*(self._row_ends if self._kind == "csv" else self._line_ends)(stream, size), size})
        return list(zip([self._start, *cuts], cuts, strict=False)) if size > self._start else []

    def _line_ends(self, stream, size):
        for place in range(self._start + PIECE, size, PIECE):
            stream.seek(place)
            yield place + len(stream.readline())

    def _row_ends(self, stream, size):
        """Where rows of CSV end, as csv sees it: a line may end within quotation marks."""
        stream.seek(self._start)
        last = self._start
        for example in self._examples(stream):
            if self._start + example.end - last >= PIECE:
                last = self._start + example.end
                yield last

    def read(self, start: int, end: int) -> tuple[list[tuple[str, ...]], list[str], int]:
        """Returns the texts of the examples of a piece, what is to be said of those that cannot be used, and its end.

        Of a packed file, that is what stands in about `PIECE` bytes, and from where to go on, -1 at its end.
        """
        if end < 0:
            with self._lock:
                return self._read_on(start)
        with self._opened() as stream:
            stream.seek(start)
            found = list(self._examples(io.BytesIO(stream.read(end - start))))
        return [example.texts for example in found if not example.fault], self._told(found, start), -1

    def _read_on(self, start):
        """As `read`, of a packed file, which is kept open where it stands: the piece after it is asked for next."""
        if self._place != start:
            self._place, self._opened_at, self._rest = start, start, self._examples_from(start)
        found, self._place = [], None
        for example in self._rest:
            found.append(example)
            if self._opened_at + example.end - start >= PIECE:
                self._place = self._opened_at + example.end
                break
        texts = [example.texts for example in found if not example.fault]
        return texts, self._told(found, self._opened_at), -1 if self._place is None else self._place

    def _examples_from(self, start):
        with self._opened() as stream:
            stream.seek(start)
            yield from self._examples(stream)

    def _told(self, examples, start):
        """A sentence for each that cannot be used; lines are counted only where there is one."""
        faults = [example for example in examples if example.fault]
        before = self._lines_before(start) if faults else 0
        return [f"{self.name}, line {before + example.line}: {example.fault}." for example in faults]

    def _lines_before(self, place):
        count = 0
        with self._opened() as stream:
            while place > 0 and (block := stream.read(min(place, PIECE))):
                place -= len(block)
                count += block.count(b"\n")
        return count

    def all(self) -> Iterator[tuple[list[tuple[str, ...]], list[str]]]:
        """What `read` returns of all pieces, one after the other."""
        for start, end in self.pieces():
            while start >= 0:
                texts, bad, start = self.read(start, end)
                yield texts, bad

    def _examples(self, lines: Iterable[bytes]) -> Iterator[_Example]:
        read = _Lines(lines)
        rows = self._rows(read)
        while True:
            line, texts, fault = read.count + 1, None, ""
            try:
                row = next(rows)
                texts = self._texts_of(row)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                fault = f"it is not UTF-8 (byte 0x{error.object[error.start]:02x} after {error.start} others)"
            except csv.Error as error:
                fault = f"it is no CSV ({error}): a quotation mark is not closed, or not doubled within a cell"
            except _Fault as error:
                fault = str(error)
            if texts or fault:
                yield _Example(texts, fault, line, read.bytes)

    def _rows(self, lines):
        if self._kind == "csv":
            csv.field_size_limit(_LONGEST_CELL)
            return csv.reader(lines, strict=True)
        return _Cells(lines) if self._kind == "tsv" else lines

    def _texts_of(self, row):
        """The texts of a line or of a row of cells, None where it is empty."""
        if self._kind == "lines":
            text = row.rstrip("\r\n")
            return (text,) if text.strip() else None
        if self._kind == "json":
            return self._texts_of_json(row) if row.strip() else None
        if not row:
            return None
        columns = len(self._header) if self._header else max(self._columns) + 1
        if len(row) < columns or (self._header and len(row) > columns):
            expected = f"{columns}, as the header has" if self._header else f"at least {columns}"
            raise _Fault(f"it has {len(row)} column{'s' * (len(row) > 1)} and needs {expected}")
        return tuple(row[column] for column in self._columns)

    def _texts_of_json(self, row):
        try:
            example = json.loads(row.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            raise _Fault(f"it is no JSON ({error.msg}, column {error.colno}), and a line is one whole object"
                         ) from error
        except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
            raise _Fault(f"it is no JSON that can be read ({first_line(error)})") from error
        if not isinstance(example, dict):
            raise _Fault(f"it must be an object such as {json.dumps({self.fields[0]: '...'})}, not "
                         f"{checks.shown(example)}")
        for field in self.fields:
            if field not in example:
                raise _Fault(f"it has no field {field!r}, {f'only {_some(example)}' if example else 'nor any other'}")
            if not isinstance(example[field], str):
                raise _Fault(f"the field {field!r} must be text, not {checks.shown(example[field])}")
            if not example[field].isascii():
                _check_encodable(field, example[field])
        return tuple(example[field] for field in self.fields)


class _Fault(Exception):
    """Why a row cannot be used."""


class _Lines:
    """Decodes lines of bytes, and counts them. Goes on after one that is not UTF-8, as a generator would not."""

    def __init__(self, lines):
        self._lines = iter(lines)
        self.count = self.bytes = 0

    def __iter__(self):
        return self

    def __next__(self):
        line = next(self._lines)
        self.count += 1
        self.bytes += len(line)
        return line.decode()


class _Cells:
    """The cells of lines that are separated by tabs, in which quotation marks mean nothing."""

    def __init__(self, lines):
        self._lines = lines

    def __iter__(self):
        return self

    def __next__(self):
        line = next(self._lines).rstrip("\r\n")
        return line.split("\t") if line.strip() else []


def _check_encodable(field, text):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Fault(f"the field {field!r} has half of a surrogate pair ({text[error.start]!r}), which is no "
                     "character") from error


def _some(names):
    """Names in quotes, the first eight of many."""
    names = list(names)
    return ", ".join(map(repr, names[:8])) + f" and {len(names) - 8} more" * (len(names) > 8)
