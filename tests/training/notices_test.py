"""A notice that a TPU VM is about to be stopped is a reason to stop; other machines ask nobody."""

import os
import signal
import time

import pytest

from switch_tf.hardware import devices, host
from switch_tf.training import stopping as stopping_module
from switch_tf.training.stopping import Stopping


@pytest.fixture
def start(metadata_server, monkeypatch):
    """A function that makes this machine a TPU VM; returns the paths that its metadata server is asked for."""

    def run(**states):
        address, asked = metadata_server(**states)
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setattr(host, "has_tpu", lambda: True)
        monkeypatch.setattr(devices, "device_type", lambda: "TPU")
        monkeypatch.setattr(host, "_TIMEOUT", 60)
        monkeypatch.setattr(stopping_module, "_PERIOD", 0.01)
        return asked

    return run


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize(("name", "before", "after", "reason"), [
    ("maintenance_event", "NONE", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance event of this VM"),
    ("preempted", "FALSE", "TRUE", "pre-emption of this VM")])
def test_a_notice_is_a_reason_to_stop(start, name, before, after, reason):
    state, said = {name: before}, []
    asked = start(**{name: lambda: state[name]})
    with Stopping(said.append) as stopping:
        wait_for(lambda: len(asked) > 4)
        assert stopping.reason is None and said == []
        state[name] = after
        wait_for(lambda: said)
        assert stopping.reason == reason
        os.kill(os.getpid(), signal.SIGTERM)  # which the cloud sends then, and which is no second request
        wait_for(lambda: len(said) == 2)
    assert said == [f"{reason}: saving after this step.",
                    "SIGTERM: saving after this step; once more stops without saving."]


def test_a_vm_that_moves_while_it_runs_and_a_server_without_an_answer_stop_nothing(start):
    answers = iter([503, 404, "MIGRATE_ON_HOST_MAINTENANCE", "NONE"])
    asked = start(maintenance_event=lambda: next(answers, "NONE"), preempted="FALSE")
    with Stopping(print) as stopping:
        wait_for(lambda: len(asked) > 12)
        assert stopping.reason is None


@pytest.mark.parametrize(("has_tpu", "kind"), [(False, "CPU"), (False, "TPU"), (True, "CPU")])
def test_a_run_that_is_not_on_the_tpu_of_this_vm_asks_nobody(start, monkeypatch, has_tpu, kind):
    asked = start(preempted="TRUE")
    monkeypatch.setattr(host, "has_tpu", lambda: has_tpu)
    monkeypatch.setattr(devices, "device_type", lambda: kind)
    with Stopping(print) as stopping:
        time.sleep(0.1)
    assert stopping.reason is None and asked == []
