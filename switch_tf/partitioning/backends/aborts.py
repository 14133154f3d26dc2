"""The end of a process that C++ code aborts: JAX's client does so when processes do not meet or one of them is lost.

Nothing else reports it. The client's own callback cannot be a function of Python, and Python calls its handlers of
signals only after C++ code has returned.
"""

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator

from switch_tf.statuses import OUTAGE
from switch_tf.storage import outputs

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_set_handler = ctypes.CDLL(None, use_errno=True).signal
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


@contextlib.contextmanager
def ending_with(message: Callable[[], str]) -> Iterator[None]:
    """Ends this process with a message, instead of a signal, when C++ code aborts it within this scope.

    Args:
        message: Function that returns the message, or "" to let the process abort.
    """
    def handle(number):
        if text := message():
            outputs.end(OUTAGE, text)

    handler = _Handler(handle)
    previous = _set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        _set_handler(signal.SIGABRT, previous)
