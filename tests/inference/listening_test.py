"""Signals end a server in order or at once."""

import os
import signal
import socket
import threading

import pytest

from switch_tf.inference import listening


def test_a_second_signal_that_comes_while_the_first_is_told_ends_it(monkeypatch):
    told = []

    class Ended(BaseException):
        """In place of the process's end."""

    def tell(text, **_):
        told.append(text)
        if len(told) == 1:
            signal.raise_signal(signal.SIGINT)

    def end(status):
        raise Ended(status)

    async def app(scope, receive, send):
        """It answers nothing."""

    monkeypatch.setattr(listening, "print", tell, raising=False)
    monkeypatch.setattr(os, "_exit", end)
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            with pytest.raises(Ended, match="130"):
                listening.serve(app, listener, lambda: signal.raise_signal(signal.SIGINT))
            for thread in threading.enumerate():
                if thread.name == "http":
                    thread.join(30)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert told[1:] == ["SIGINT once more: ended at once."]
