"""Files of examples: lines (.txt), JSON objects (.jsonl, .json), rows of tables (.tsv, .csv), each also as .gz.

A file may be larger than memory.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import random
import stat
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import tensorflow as tf
import tqdm

from switch_tf import checks
from switch_tf.data.rows import KINDS, BrokenArray, Example, Fault, Lines, Rows, skip_line
from switch_tf.refusals import Refusal, first_line
from switch_tf.sentencepiece_training import sentences_of

# The unit of reading and shuffling: hundreds of documents, thousands of short lines.
PIECE = 2**20  # bytes
MAX_SENTENCES = 1_000_000  # more hardly change a vocabulary
_HEAD = 2**12  # bytes
_MARK = b"\xef\xbb\xbf"  # byte order mark
_NO_FILES = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
             stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


class BadData(Refusal):
    """Unusable data. Names the file, the line and the reason."""


class UnreachableData(BadData):
    """Data that a disk or a bucket does not deliver, perhaps only for now."""


def kind_of(name: str) -> str | None:
    """Returns a file's kind by its ending: a value of `KINDS`, or None."""
    return KINDS.get("." + name.lower().removesuffix(".gz").rpartition(".")[2])


def find_files(name: str, patterns: str | Sequence[str]) -> list[str]:
    """Returns the files of paths and globs, here or at gs://, each once.

    Args:
        name: Argument for messages.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not patterns:
        raise Refusal(f"{name} must be a path, a glob, or a list of them, not {checks.shown(patterns)}.")
    matches = []
    for pattern in patterns:
        checks.text(name, pattern)
        try:
            files = [pattern] if tf.io.gfile.exists(pattern) else sorted(tf.io.gfile.glob(pattern))
            folders = [file for file in files if tf.io.gfile.isdir(file)]
        except tf.errors.OpError as error:
            raise Refusal(f"{name} {pattern!r} cannot be looked up: {first_line(error)}.") from error
        if not files:
            raise Refusal(f"{name}: there is no file {pattern!r}{_dangling(pattern)}; a relative path starts where "
                          "the command does.")
        if folders:
            inside = f"{folders[0].rstrip('/')}/*.jsonl"
            raise Refusal(f"{name}: {folders[0]!r} is a folder; name its files, for example {inside!r}.")
        matches += files
    return list(dict.fromkeys(matches))


def examples_of_lines(stream: BinaryIO, kind: str, fields: Sequence[str | int]) -> Iterator[Example]:
    """Returns the examples in a stream of lines, such as standard input.

    Args:
        stream: Has `readline(size)`.
        kind: "lines" or "json".
        fields: See `TextFile`.
    """
    return _rows("The lines", kind, fields).read(stream)


def _rows(name, kind, fields):
    try:
        return Rows(kind, fields)
    except Fault as error:
        raise Refusal(f"{name} cannot be read so: {error}.") from error


def _dangling(name):
    return f", only a link to {os.readlink(name)!r}, which is not there" if os.path.islink(name) else ""


class _Remote(io.RawIOBase):
    """TensorFlow's file as a raw stream, because its `readline` takes no limit."""

    def __init__(self, name):
        self._file = tf.io.gfile.GFile(name, "rb")

    def readable(self):
        return True

    seekable = readable

    def readinto(self, buffer):
        content = self._file.read(len(buffer))
        buffer[:len(content)] = content
        return len(content)

    def seek(self, offset, whence=io.SEEK_SET):
        self._file.seek(offset, whence)
        return self._file.tell()

    def close(self):
        self._file.close()
        super().close()


def _open(name):
    if "://" in name:
        return io.BufferedReader(_Remote(name))
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:  # any other error may be temporary, also of a link's disk
        if dangling := _dangling(name):
            raise Fault(f"there is no such file{dangling}") from None
        raise
    if not stat.S_ISREG(mode):
        raise Fault(f"it is {_NO_FILES.get(stat.S_IFMT(mode), 'no ordinary file')}, and files are read more than once "
                    "and from any place: copy what comes out of it to a file, and name that")
    return open(name, "rb")


class TextFile:
    """The examples of one file.

    Args:
        fields: Keys of JSON objects, columns of a table with a header, or column numbers from 0 without one. One field
            for a .txt file: the whole line.
        kind: A value of `KINDS` that overrides the name's ending.
    """

    def __init__(self, name: str, fields: Sequence[str | int], kind: str | None = None):
        self.name = checks.text("The name of a file", name)
        if isinstance(fields, str) or not isinstance(fields, Sequence) or not fields:
            raise Refusal(f"The fields of {name!r} must be a list of names or numbers, not {checks.shown(fields)}.")
        self._is_compressed = name.lower().endswith(".gz")
        self._kind = kind or kind_of(name)
        if self._kind is None:
            raise Refusal(f"{name!r} ends in none of {', '.join(KINDS)}, with or without .gz, which say what is in "
                          "a file; rename it.")
        self._place, self._opened_at, self._rest = -1, 0, iter(())  # of a piece that is being read
        self._lock = threading.Lock()
        self._size = 0  # when first opened
        with self._opened() as stream:
            head = stream.read(_HEAD)
            is_marked = head.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff"))
            # Half of the bytes of UTF-16 text are zeros, and three quarters of UTF-32.
            if is_marked or len(head) / 3 < head.count(0) < 0.9 * len(head):
                why = "begins with the byte order mark of UTF-16 or UTF-32" if is_marked else (
                    "has zero bytes between its characters, as UTF-16 has")
                raise Refusal(f"{name} {why}, and text is read as UTF-8; convert it, for example with iconv -f UTF-16 "
                              "-t UTF-8 FILE > NEW_FILE.")
            self._start = len(_MARK) * head.startswith(_MARK)  # of the first example, in bytes
            if self._kind == "json":
                if head[self._start:].lstrip().startswith(b"["):
                    self._kind, self._start = "array", head.index(b"[") + 1
                else:
                    stream.seek(self._start)
                    self._check_objects_are_lines(stream)
            self._rows = _rows(name, self._kind, fields)
            if self._rows.has_header:
                stream.seek(self._start)
                try:
                    self._start += self._rows.take_header(stream)
                except Fault as error:
                    raise Refusal(f"{name}, line 1: {error}.") from error

    def _check_objects_are_lines(self, stream):
        lines = (line for line in Lines(stream) if line.strip())
        try:
            first, second = next(lines, "{}").strip(), next(lines, None)
            json.loads(first)
        except json.JSONDecodeError as error:
            if second is not None and first.startswith("{") and error.pos >= len(first):
                raise Refusal(f"{self.name}, line 1: a JSON object begins here and goes on in the next line, and each "
                              "line has to be one whole object; jq -c . FILE > NEW_FILE makes such lines.") from error
        except (ValueError, RecursionError, Fault):  # the faults of a line are reported when it is read
            return

    @contextlib.contextmanager
    def _opened(self):
        """Yields the unpacked file. It may grow but not shrink. A run reads added lines after its next start."""
        try:
            with _open(self.name) as stream:
                size = stream.seek(0, io.SEEK_END)
                stream.seek(0)
                if size < self._size:  # so that positions no longer match lines
                    raise self._shrunk(size)
                if self._is_compressed and not size:
                    raise Fault("it is empty, and a .gz file of no text has some 20 bytes")
                self._size = self._size or size
                yield gzip.GzipFile(fileobj=stream) if self._is_compressed else stream
        except (OSError, EOFError, zlib.error, tf.errors.OpError, Fault) as error:
            kind = BadData if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error, Fault)) else UnreachableData
            raise kind(f"{self.name} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}."
                       ) from error

    def _shrunk(self, size):
        return BadData(f"{self.name} had {self._size:,} bytes when this process opened it and has {size:,} now; files "
                       "must not change while they are read. Put the file back, and the same command goes on.")

    def pieces(self) -> list[tuple[int, int]]:
        """Returns the (start, end) of pieces of whole examples, about `PIECE` bytes each, in order.

        A packed file or a JSON array can only be read from its beginning, so it is one piece with the end -1.
        """
        if self._is_compressed or self._kind == "array":
            return [(self._start, -1)]
        cuts = [self._start]
        with self._opened() as stream:
            size = stream.seek(0, io.SEEK_END)
            if self._kind == "csv":  # lines may end within quotation marks
                for example in self.examples():
                    if self._start + example.end - cuts[-1] >= PIECE:
                        cuts.append(self._start + example.end)
            else:
                for place in range(self._start + PIECE, size, PIECE):
                    if place >= cuts[-1]:  # otherwise it is within the last line
                        stream.seek(place)
                        cuts.append(place + skip_line(stream))
        cuts += [size] * (size > cuts[-1])
        return list(itertools.pairwise(cuts))

    def read(self, start: int, end: int) -> tuple[list[tuple[str, ...]], list[str], int]:
        """Returns the texts of a piece, a sentence for each unusable example, and the next start, -1 at the end.

        A piece with the end -1 is read in steps of about `PIECE` bytes and stays open between them.
        """
        after = -1
        if end >= 0:
            origin = start
            with self._opened() as stream:
                stream.seek(start)
                examples = list(self._rows.read(stream, end - start))
            if (size := examples[-1].end if examples else 0) < end - start:  # the file lost its end while it was read
                raise self._shrunk(start + size)
        else:
            with self._lock:
                if self._place != start:
                    self._opened_at, self._rest = start, self._examples_from(start)
                examples, origin, self._place = [], self._opened_at, -1
                for example in self._rest:
                    examples.append(example)
                    if origin + example.end - start >= PIECE:
                        after = self._place = origin + example.end
                        break
        faults = [example for example in examples if example.fault]
        before = self._lines_before(origin) if faults else 0
        return ([example.texts for example in examples if example.texts],
                [f"{self.name}, line {before + example.line}: {example.fault}." for example in faults], after)

    def _examples_from(self, start):
        with self._opened() as stream:
            stream.seek(start)
            try:
                yield from self._rows.read(stream)
            except BrokenArray as error:
                raise BadData(f"{self.name}, line {self._lines_before(start) + error.line}: {error}.") from error

    def examples(self) -> Iterator[Example]:
        """Yields all lines, rows or elements, also without texts."""
        return self._examples_from(self._start)

    def num_lines(self) -> int | None:
        """Counts lines of text or JSON objects. None for other files."""
        if self._is_compressed or self._kind not in ("lines", "json"):
            return None
        with self._opened() as stream:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(max(0, size - 1))
            has_rest = stream.read(1) not in (b"", b"\n")
        return self._lines_before(size) + has_rest

    def _lines_before(self, place):
        count = 0
        with self._opened() as stream:
            while place > 0 and (block := stream.read(min(place, PIECE))):
                place -= len(block)
                count += block.count(b"\n")
        return count

    def all(self) -> Iterator[tuple[list[tuple[str, ...]], list[str]]]:
        """Yields the results of `read`, piece by piece."""
        for start, end in self.pieces():
            while start >= 0:
                texts, bad, start = self.read(start, end)
                yield texts, bad


def sample_sentences(patterns: Sequence[str], fields: Sequence[str | int]) -> tuple[list[str], int]:
    """Draws at most `MAX_SENTENCES` sentences from text files, uniformly; also returns the number of texts.

    Args:
        fields: See `TextFile`.
    """
    sample, generator, num_texts, num_sentences = [], random.Random(0), 0, 0
    files = [TextFile(name, fields) for name in find_files("--input", patterns)]
    with tqdm.tqdm(desc=f"reading {len(files)} file{'s' * (len(files) > 1)}", unit=" texts",
                   mininterval=0.5) as progress:
        for records, faults in itertools.chain.from_iterable(file.all() for file in files):
            if faults:
                raise BadData(faults[0])
            num_texts += len(records)
            progress.update(len(records))
            for text in itertools.chain.from_iterable(records):
                for sentence in sentences_of(text):
                    num_sentences += 1
                    if len(sample) < MAX_SENTENCES:
                        sample.append(sentence)
                    elif (place := generator.randrange(num_sentences)) < MAX_SENTENCES:
                        sample[place] = sentence
    if not sample:
        raise Refusal(f"There is no text in {', '.join(patterns)}.")
    if num_sentences > len(sample):
        print(f"{len(sample):,} of {num_sentences:,} sentences are learned from.", file=sys.stderr)
    return sample, num_texts
