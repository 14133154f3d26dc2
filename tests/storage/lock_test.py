"""Two processes never use one path, a kill keeps nobody out for long, and a process that slept changes nothing."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from switch_tf import environment
from switch_tf.refusals import Outage, Refusal
from switch_tf.storage import leftovers, lock, places, whole_file

_HOLD = """
import sys
from switch_tf.storage import lock
lock.PERIOD = 0.1
with lock.held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path):
    """Starts a process that holds an output until its standard input ends."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(lock, "PERIOD", 0.1)
    monkeypatch.setattr(lock, "LIFETIME", 1.5)


@pytest.fixture
def folder(bucket):
    return places.at(bucket.new_folder())


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a file on the disk until its standard input ends."""
    process = hold(tmp_path / "out.jsonl")
    yield process
    process.kill()
    process.communicate()


def take(folder):
    """Takes a run folder as another process does for which this one is dead."""
    _, generation = places.read_object(folder / "lock")
    places.write_object(folder / "lock", b'{"host": "other", "pid": 7, "processes": "others"}', generation)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, holder):
    link = tmp_path / "link"
    link.symlink_to("out.jsonl")
    for path in (tmp_path / "out.jsonl", link, f"{tmp_path}/./out.jsonl"):
        message = rf"Another process \(pid {holder.pid}\) is writing '.*'; wait for it, stop it, or name another --out"
        with pytest.raises(Refusal, match=message), lock.held(path):
            raise AssertionError("It was not locked.")
    with lock.held(tmp_path / "other.jsonl"):
        assert len(list(tmp_path.glob(".*.lock"))) == 2
    holder.communicate("")
    with lock.held(tmp_path / "out.jsonl"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_what_is_killed_locks_nobody_out(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.jsonl.lock").read_text() == str(holder.pid)
    with lock.held(tmp_path / "out.jsonl"):
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
    with lock.held(tmp_path / "out"):
        assert len(calls) == 2 and file.exists()


def test_an_error_within_is_passed_on_and_the_lock_goes(tmp_path):
    with pytest.raises(KeyError), lock.held(tmp_path / "new" / "out"):
        raise KeyError
    assert not list((tmp_path / "new").iterdir())


def test_an_output_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("no folder")
    message = r"--output '.*file/out' cannot be written \(.*\); name another one"
    with pytest.raises(Refusal, match=message), lock.held(tmp_path / "file" / "out"):
        raise AssertionError("It was locked.")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(lock, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (r"The file system of '.*out' has no locks \(No locks available\), so two processes could write there "
               "at a time; name another --output, on a local disk")
    with pytest.raises(Refusal, match=message), lock.held(tmp_path / "out"):
        raise AssertionError("There are no locks.")


# In a bucket.


def test_a_second_process_is_refused_in_a_bucket_until_the_first_has_ended(folder, capfd):
    first = hold(folder / "out")
    message = rf"Another process \(pid {first.pid} on {socket.gethostname()}\) is writing .*; wait for it, stop it"
    with pytest.raises(Refusal, match=message), lock.held(folder / "out"):
        raise AssertionError("It was not locked.")
    assert "waiting up to 2 s for a sign of life" in capfd.readouterr().err
    first.communicate("")
    with lock.held(folder / "out"):
        assert places.urls_of(folder) == [f"{folder}/.out.lock"]
    assert not places.urls_of(folder)


@pytest.mark.parametrize("is_here", [True, False])
def test_what_is_killed_keeps_nobody_out_of_a_bucket(folder, is_here, monkeypatch):
    first = hold(folder / "out")
    first.kill()
    first.communicate()
    if not is_here:
        monkeypatch.setattr(environment, "visible_processes", lambda: "another")  # where process ids say nothing
    started = time.monotonic()
    with lock.held(folder / "out"):
        assert (time.monotonic() - started > 1) != is_here


@pytest.mark.parametrize("count", [8])
def test_of_many_that_come_at_once_one_holds_it(folder, count):
    held, taken = [], []

    def come():
        try:
            held.append(lock.Lock(folder, folder / "lock"))
        except Refusal as error:
            taken.append(error)

    threads = [threading.Thread(target=come) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(taken) == count - 1
    held[0].close()


def test_whatever_a_process_writes_or_removes_after_another_one_took_its_folder_is_refused(folder, monkeypatch):
    """Also if it has not noticed, because it slept between its check and its write."""
    held = lock.Lock(folder, folder / "lock")
    mirrored = whole_file.Mirror(folder)
    for name in ("whole", "removed", "deep/whole"):
        whole_file.write_whole(folder / name, name)
    (mirrored.local / "lines").write_text("one")
    mirrored.flush()
    take(folder)
    kept = [url for url in places.urls_of(folder) if not url.endswith("/lock")]
    with monkeypatch.context() as sleeping:
        sleeping.setattr(lock.Lock, "_renew", lambda self: None)  # not noticed
        for url in kept:  # as the new owner does
            places.at(url).write_bytes(b"other")
        for write in (lambda: whole_file.write_whole(folder / "whole", "late"),
                      lambda: whole_file.remove(folder / "removed")):
            # It sleeps after the first check, and the second one is refused.
            sleeping.setattr(held, "check", mock.Mock(side_effect=[None, Outage("second check")]))
            with pytest.raises(Outage, match="second check"):
                write()
    (mirrored.local / "lines").write_text("one, two")
    held._renewed = 0  # a minute later
    for write in (lambda: whole_file.write_whole(folder / "new", "late"), mirrored.flush, mirrored.close,
                  lambda: leftovers.remove(folder / "deep"), lambda: leftovers.set_aside(folder / "whole")):
        with pytest.raises(Outage, match=r"Another process \(pid 7 on other\) has taken the run folder .* suspended"):
            write()
    held.close()
    assert {places.read_object(url)[0] for url in kept} == {b"other"}
    assert places.urls_of(folder) == sorted([*kept, f"{folder}/lock"])


def test_a_file_that_somebody_else_changed_is_written_again_by_its_owner(folder):
    with lock.held(folder / "out"):
        whole_file.write_whole(folder / "out", "one")
        (folder / "out").write_text("by hand")
        whole_file.write_whole(folder / "out", "two")
        (folder / "out").unlink()
        whole_file.write_whole(folder / "out", "three")
    assert (folder / "out").read_text() == "three"


def test_of_nested_locks_the_innermost_decides(folder, tmp_path):
    """A comparison locks its folder, and each of its runs the folder of its variant."""
    with lock.held(folder / "comparison"):
        held = lock.Lock(folder / "comparison" / "run", folder / "comparison" / "run" / "lock")
        whole_file.write_whole(folder / "comparison" / "run" / "a", "first")
        take(folder / "comparison" / "run")
        held._renewed = 0  # a minute later
        with pytest.raises(Outage, match="has taken the run folder"):
            whole_file.write_whole(folder / "comparison" / "run" / "a", "late")
        whole_file.write_whole(folder / "comparison" / "a", "its own")
        held.close()


def test_shards_and_other_large_files_are_fenced(folder):
    with lock.held(folder / "out") as held:
        with whole_file.written(folder / "out" / "shard") as unfinished:
            unfinished.write_bytes(b"first")
        _, generation = places.read_object(folder / ".out.lock")
        places.write_object(folder / ".out.lock", b"{}", generation)
        held._renewed = 0  # a minute later
        with pytest.raises(Outage, match="has taken the output"), \
                whole_file.written(folder / "out" / "shard") as unfinished:
            unfinished.write_bytes(b"late")
    assert (folder / "out" / "shard").read_bytes() == b"first"


def test_a_renewal_and_an_upload_take_one_request_each(folder, bucket, monkeypatch):
    """Four renewals and eight uploads a minute, which docs/buckets.md adds up."""
    monkeypatch.setattr(lock, "PERIOD", 1000.0)
    with lock.held(folder / "out") as held:
        whole_file.write_whole(folder / "out", "one")
        for request in (held._renew, lambda: whole_file.put(folder / "out", b"two")):
            before = bucket.control()["requests"]
            request()
            assert bucket.control()["requests"] == before + 1


def test_a_lease_is_renewed_during_a_long_upload(folder, monkeypatch):
    write = places.write_object

    def slow(path, content, generation):
        if content == b"long":
            time.sleep(2 * lock.LIFETIME)
        return write(path, content, generation)

    monkeypatch.setattr(places, "write_object", slow)
    with lock.held(folder / "out") as held:
        before = held._renewed
        whole_file.write_whole(folder / "out", "long")
        assert held._renewed > before + 1.5 * lock.LIFETIME
    assert (folder / "out").read_text() == "long"


def test_a_folder_that_was_removed_is_no_takeover(folder):
    held = lock.Lock(folder, folder / "lock")
    places.write_object(folder / "lock", None, None)
    time.sleep(0.3)
    with pytest.raises(Outage, match="was removed or replaced while this process was training in it"):
        held.check()
    held.close()


def test_a_process_that_sleeps_over_a_write_changes_nothing(folder):
    """The real thing: a process is stopped until another one has taken its output and finished."""
    first = subprocess.Popen([sys.executable, "-c", """
import sys
from switch_tf.storage import lock, whole_file
lock.PERIOD, lock.LIFETIME = 0.1, 1.5
with lock.held(sys.argv[1]):
    print("held", flush=True)
    count = 0
    while True:
        count += 1
        whole_file.write_whole(sys.argv[1], f"first {count}")
""", str(folder / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "held\n"
    time.sleep(0.5)
    first.send_signal(signal.SIGSTOP)
    with lock.held(folder / "out"):
        whole_file.write_whole(folder / "out", "second")
    first.send_signal(signal.SIGCONT)
    _, error = first.communicate(timeout=60)
    assert first.returncode and "so nothing" in error and (folder / "out").read_text() == "second"


def test_a_bucket_that_cannot_be_written_is_refused_with_the_way_out():
    with pytest.raises(Refusal, match=r"--output 'gs://locked/out' cannot be written \(.*access"), \
            lock.held("gs://locked/out"):
        raise AssertionError("It was locked.")
