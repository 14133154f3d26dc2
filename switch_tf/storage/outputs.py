"""Standard output and standard error, also of C++ libraries that bypass Python's streams."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, NoReturn, TextIO, cast

from switch_tf.refusals import Refusal

_LAST_SECONDS = 2  # for pending output, because its reader may have stopped
_MARK = b"\0switch_tf: written up to here\n"

_ending = threading.Lock()
_withheld = []  # standard error itself, within `held_back`
_finishing = []  # each returns once its pipe is copied


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def end(status: int, message: str = "") -> NoReturn:
    """Ends this process without exit handlers, after its output. The first of several threads does so.

    Args:
        status: Exit status, or minus a signal.
        message: Last line on standard error, also within `held_back`.
    """
    _ending.acquire()  # for good
    if message:
        with contextlib.suppress(OSError):  # a closed terminal
            os.write(_withheld[0] if _withheld else 2, f"{message}\n".encode())
    printing = threading.Thread(target=_write_all, daemon=True)
    printing.start()
    printing.join(_LAST_SECONDS)
    if status < 0:
        ctypes.CDLL(None).signal(-status, None)  # Python's own function works only in the main thread
        signal.raise_signal(-status)
    os._exit(status)


def _write_all():
    _flush()
    for finish in _finishing:
        finish()


def _flush():
    with contextlib.suppress(OSError, ValueError):  # closed by its reader or here
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # the buffers of C


def discard_closed() -> None:
    """Discards further output to a closed terminal or pipe."""
    poller = select.poll()
    for output in (1, 2):
        poller.register(output, 0)  # reports only errors
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output, _ in poller.poll(0):
        os.dup2(nowhere, output)
    os.close(nowhere)


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Discards output that cannot be written within this scope, so that it does not end a long run.

    A closed terminal sends no signal to background processes.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Outlived(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Outlived:
    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        with _ignored_errors():
            self._stream.write(text)
        return len(text)

    def flush(self):
        with _ignored_errors():
            self._stream.flush()

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextlib.contextmanager
def _ignored_errors():
    try:
        yield
    except OSError:
        discard_closed()


@contextlib.contextmanager
def held_back() -> Iterator[IO[bytes]]:
    """Withholds standard error within this scope in a file. An exception other than a Refusal or Ctrl-C prints it."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as written:
        _withheld.append(original)
        os.dup2(written.fileno(), 2)
        try:
            yield written
        except (Refusal, KeyboardInterrupt):
            raise
        except BaseException:
            written.seek(0)
            os.write(original, written.read())
            raise
        finally:
            os.dup2(original, 2)
            _withheld.remove(original)
            os.close(original)


@contextlib.contextmanager
def drop_lines(prefix: bytes) -> Iterator[None]:
    """Removes lines with a prefix from standard output."""
    _flush()
    original = os.dup(1)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    output, is_finished = os.dup(original), threading.Event()

    def copy():
        try:
            # A closed output closes the pipe, so writers fail, too.
            with contextlib.suppress(OSError), open(output, "wb", buffering=0) as copied, open(read_end, "rb") as lines:
                for line in lines:
                    text = line.removesuffix(_MARK)
                    if text and not text.startswith(prefix):
                        copied.write(text)
                    if text != line:
                        is_finished.set()
        finally:
            is_finished.set()

    def finish():
        with contextlib.suppress(BrokenPipeError):  # the output is closed
            os.write(write_end, _MARK)
        is_finished.wait()

    threading.Thread(target=copy, daemon=True).start()
    _finishing.append(finish)
    try:
        yield
    finally:
        _flush()
        os.dup2(original, 1)
        os.close(original)
        _finishing.remove(finish)
        finish()
        os.close(write_end)  # ends the thread, unless a child process has the pipe, too
