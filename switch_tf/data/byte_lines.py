"""Lines of bytes up to a limit of length, from ordinary files.

A line is in memory several times, as bytes, text and tokens. An endless line, such as a file without line ends or a
small .gz that unpacks to a thousand times its size, must be refused before it is read whole.
"""

import io
import os
import stat
from typing import BinaryIO

import tensorflow as tf

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
