"""The first signal stops a run in order. A second one ends the process, even if the main thread cannot react."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from switch_tf.refusals import Outage
from switch_tf.storage import outputs
from switch_tf.training import stopping as stopping_module
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
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert "SIGINT once more: ended without saving." in process.stderr.read()


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


def test_a_second_signal_within_two_seconds_repeats_the_first_but_ctrl_c_does_not(monkeypatch):
    ended, said = [], []
    monkeypatch.setattr(outputs, "end", lambda status, message: ended.append(message))
    with Stopping(said.append) as stopping:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        wait_for(ended, 1)
        assert (stopping.reason, len(said), ended) == ("SIGTERM", 1, ["SIGINT once more: ended without saving."])
        monkeypatch.setattr(stopping_module, "_ONE_REQUEST", 0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(ended, 2)
        assert ended[1] == "SIGTERM once more: ended without saving."


def test_a_second_signal_that_waits_while_the_first_is_printed_repeats_it(monkeypatch):
    """`timeout` sends two at once, and on a busy machine printing takes longer than they are apart."""
    ended, said = [], []
    monkeypatch.setattr(outputs, "end", lambda status, message: ended.append(message))
    monkeypatch.setattr(stopping_module, "_ONE_REQUEST", 0.2)
    with Stopping(lambda text: (time.sleep(0.4), said.append(text))):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for(said, 1)
        time.sleep(0.1)
    assert (len(said), ended) == (1, [])


def end_of_thread(ended):
    """Returns a function that ends its thread, where `outputs.end` ends the process, and notes its arguments."""

    def end(status, message):
        ended.append((status, message))
        sys.exit()

    return end


class Training:
    """A run that trains at the first calls of `rescue` and compiles at the next one."""

    def __init__(self, on_sigusr1="stop", busy=0):
        self.run, self.busy, self.requests = types.SimpleNamespace(on_sigusr1=on_sigusr1), busy, 0

    def last_save(self):
        return "The last save is of step 4, at 12:00:00."

    def request_save(self):
        self.requests += 1

    def rescue(self, reason):
        self.busy -= 1
        return None if self.busy >= 0 else f"rescued from {reason}"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_a_job_queue_stop_and_by_a_setting_save(number):
    for setting in ("stop", "save"):
        said, trainings = [], [Training(setting), Training(setting)]
        is_save = setting == "save" and number == signal.SIGUSR1
        with Stopping(said.append) as stopping:
            stopping.watch(trainings)
            os.kill(os.getpid(), number)
            wait_for(said, 1)
            if is_save:
                os.kill(os.getpid(), signal.SIGTERM)  # the first request to stop
                wait_for(said, 2)
        assert stopping.reason == ("SIGTERM" if is_save else number.name)
        assert [training.requests for training in trainings] == [is_save, is_save]
        assert said[0] == (
            "SIGUSR1: saving after this step, and going on." if is_save else
            f"{number.name}: saving after this step; once more stops without saving. The last save is of step 4, at "
            "12:00:00.")


def test_runs_that_do_not_stop_by_themselves_are_saved_by_the_thread_when_all_can_be(monkeypatch):
    ended = []
    monkeypatch.setattr(outputs, "end", end_of_thread(ended))
    monkeypatch.setattr(stopping_module, "_PATIENCE", 0.02)
    with Stopping(lambda text: None) as stopping:
        stopping.watch([Training(), Training(busy=2)])
        time.sleep(0.1)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(ended, 1)
    assert ended[0] == (130, "rescued from SIGTERM\nrescued from SIGTERM")
    assert stopping._trainings[1].busy <= -1


def test_a_run_that_cannot_be_saved_ends_by_the_status_of_its_refusal(monkeypatch):
    ended, full = [], Training()

    def rescue(reason):
        raise Outage("The disk is full.")

    full.rescue = rescue
    monkeypatch.setattr(outputs, "end", end_of_thread(ended))
    monkeypatch.setattr(stopping_module, "_PATIENCE", 0.02)
    with Stopping(lambda text: None) as stopping:
        stopping.watch([full])
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(ended, 1)
    assert ended[0] == (4, "The disk is full.")


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
