"""The first signal stops a run in order. A second one ends the process, even if the main thread cannot react."""

import os
import signal
import subprocess
import sys
import time

from switch_tf.training.stopping import Ending, Stopping

# Waits like TensorFlow for data that never come: in C, without the interpreter's lock, and deaf to signals.
WAITING = """
import ctypes, sys
from switch_tf.training.stopping import Stopping

mutex = ctypes.create_string_buffer(64)
with Stopping(lambda text: print(text, file=sys.stderr, flush=True)):
    print("waits", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


ENDING = """
import ctypes, os
from switch_tf.storage import outputs
from switch_tf.training.stopping import Ending

mutex = ctypes.create_string_buffer(64)
with Ending("train"), outputs.held_back():
    os.write(2, b"withheld")
    print("waits", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def wait_for(said, count):
    """Waits for a number of printed lines."""
    deadline = time.monotonic() + 10
    while len(said) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_first_signal_is_the_reason_to_stop_and_signals_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    said = []
    with Stopping(said.append) as stopping:
        assert stopping.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(said, 1)
        assert stopping.reason == "SIGTERM"
    assert said == ["SIGTERM: saving after this step; once more stops without saving."]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_a_process_that_waits_for_good():
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    assert "SIGINT: saving after this step" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 130
    assert "SIGTERM once more: ended without saving." in process.stderr.read()


def test_a_closed_terminal_stops_in_order_and_under_nohup_does_nothing():
    said = []
    with Stopping(said.append) as stopping:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(said, 1)
        assert stopping.reason == "SIGHUP"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping(said.append) as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(said, 2)
            assert stopping.reason == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_a_parent_that_has_ended_count_as_one(monkeypatch):
    said = []
    with Stopping(said.append) as stopping:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    # The end of the context waits until every signal has been read.
    assert stopping.reason == "SIGTERM" and len(said) == 1


def test_a_signal_ends_a_process_that_waits_for_others_with_a_line():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == -number
        assert errors == f"switch-tf train: interrupted by {number.name}.\n"


def test_a_scope_within_another_takes_the_signals_and_gives_them_back(monkeypatch):
    heard, said = [], []
    monkeypatch.setattr(Ending, "_heard", lambda self, number: heard.append(number))
    with Ending("train"):
        with Stopping(said.append) as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(said, 1)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(heard, 1)
    assert stopping.reason == "SIGTERM" and heard == [signal.SIGINT]
