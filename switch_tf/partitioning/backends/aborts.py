"""The end of a process that C++ code aborts: JAX's client does so when processes do not meet or one of them is lost.

Nothing else reports it. The client's own callback cannot be a function of Python, and Python calls its handlers of
signals only after C++ code has returned.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_set_handler = ctypes.CDLL(None, use_errno=True).signal
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

_ending = threading.Lock()


@contextlib.contextmanager
def ending_with(message: Callable[[], str], output: int = 2) -> Iterator[None]:
    """Ends this process with a message, instead of a signal, when C++ code aborts it within this scope.

    Args:
        message: Function that returns the message, or "" to let the process abort.
        output: File descriptor that the message is written to.
    """
    def handle(number):
        if text := message():
            end(text, output)

    handler = _Handler(handle)
    previous = _set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        _set_handler(signal.SIGABRT, previous)


def end(message: str, output: int = 2) -> NoReturn:
    """Writes a message and ends this process at once, with status 2. Of several threads, the first one does."""
    _ending.acquire()  # for good
    os.write(output, f"{message}\n".encode())
    os._exit(2)
