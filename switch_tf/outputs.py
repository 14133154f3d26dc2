"""Standard output and standard error as C++ libraries write to them, past Python's streams."""

import contextlib
import os
import sys
import tempfile
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
