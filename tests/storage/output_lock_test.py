"""Two processes on one output: the second is refused, and what a kill leaves locks nobody out."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from switch_tf.refusals import Refusal
from switch_tf.storage import output_lock

_HOLD = """
import sys
from switch_tf.storage import output_lock
with output_lock.held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a file until its standard input ends."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path / "out.jsonl")], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, holder):
    link = tmp_path / "link"
    link.symlink_to("out.jsonl")
    for path in (tmp_path / "out.jsonl", link, f"{tmp_path}/./out.jsonl"):
        message = rf"Another process \(pid {holder.pid}\) is writing '.*'; wait for it, stop it, or name another --out"
        with pytest.raises(Refusal, match=message), output_lock.held(path):
            raise AssertionError("It was not locked.")
    with output_lock.held(tmp_path / "other.jsonl"):
        assert len(list(tmp_path.glob(".*.lock"))) == 2
    holder.communicate("")
    with output_lock.held(tmp_path / "out.jsonl"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_what_is_killed_locks_nobody_out(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.jsonl.lock").read_text() == str(holder.pid)
    with output_lock.held(tmp_path / "out.jsonl"):
        assert (tmp_path / ".out.jsonl.lock").read_text() == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    file, flock, calls = tmp_path / ".out.lock", fcntl.flock, []

    def slow(lock, how):
        calls.append(how)
        if len(calls) == 1:
            file.unlink()  # by the process before, which ends between `open` and `flock`
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with output_lock.held(tmp_path / "out"):
        assert len(calls) == 2 and file.exists()


def test_an_error_within_is_passed_on_and_the_lock_goes(tmp_path):
    with pytest.raises(KeyError), output_lock.held(tmp_path / "new" / "out"):
        raise KeyError
    assert not list((tmp_path / "new").iterdir())


def test_an_output_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("no folder")
    message = r"--output '.*file/out' cannot be written \(.*\); name another one"
    with pytest.raises(Refusal, match=message), output_lock.held(tmp_path / "file" / "out"):
        raise AssertionError("It was locked.")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(lock, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (r"The file system of '.*out' has no locks \(No locks available\), so two processes could write there "
               "at a time; name another --output, on a local disk")
    with pytest.raises(Refusal, match=message), output_lock.held(tmp_path / "out"):
        raise AssertionError("There are no locks.")
