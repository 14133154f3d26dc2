"""Standard output and standard error as C++ libraries write to them, past Python's streams."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from switch_tf.refusals import Refusal


@contextlib.contextmanager
def held_back() -> Iterator[IO[bytes]]:
    """Withholds standard error within this scope, and prints it only if an exception other than a Refusal is raised.

    Yields:
        The file that receives what is written.
    """
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield written
        except Refusal:
            raise
        except BaseException:
            written.seek(0)
            os.write(original, written.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


@contextlib.contextmanager
def without_lines(prefix: bytes) -> Iterator[None]:
    """Removes the lines with a prefix from standard output within this scope."""
    sys.stdout.flush()
    original = os.dup(1)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)
    copier = threading.Thread(target=_copy_others, args=(read_end, original, prefix), daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, 1)  # closes the pipe, which ends the thread unless a child process has it as well
        copier.join(timeout=1)


def _copy_others(read_end, original, prefix):
    with open(read_end, "rb") as lines, open(original, "wb", buffering=0) as output:
        for line in lines:
            if not line.startswith(prefix):
                output.write(line)
