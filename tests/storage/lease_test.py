"""Two processes never hold a lease of one folder, and what a kill leaves keeps nobody out for long."""

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from switch_tf import environment
from switch_tf.storage import lease, places

_HOLD = """
import sys
from switch_tf.storage import lease
lease._SETTLING = 0.1
try:
    held = lease.Lease(sys.argv[1])
except lease.Taken as taken:
    print("taken by", taken.holder.pid, flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
    held.close()
"""


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def folder(request, tmp_path):
    """A new folder, on the disk or in a bucket."""
    place = places.at(tmp_path if request.param == "disk" else request.getfixturevalue("bucket").new_folder())
    return place / "lease"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(lease, "_SETTLING", 0.1)
    monkeypatch.setattr(lease, "PERIOD", 0.1)
    monkeypatch.setattr(lease, "LIFETIME", 1.5)


@pytest.fixture
def holder(folder):
    """A process that holds the lease until its standard input ends."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_has_ended(folder, holder):
    with pytest.raises(lease.Taken) as raised:
        lease.Lease(folder)
    assert raised.value.holder.pid == holder.pid and raised.value.holder.host == socket.gethostname()
    holder.communicate("")
    lease.Lease(folder).close()
    assert not list(folder.iterdir()) if folder.exists() else True


def test_what_is_killed_here_keeps_nobody_out(folder, holder, monkeypatch):
    monkeypatch.setattr(lease, "LIFETIME", 1000.0)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    held = lease.Lease(folder)
    assert lease.is_leased(folder) and not held.is_lost
    held.close()


def test_what_is_killed_elsewhere_is_waited_for(folder, holder, monkeypatch):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(environment, "visible_processes", lambda: "another")  # where these process ids say nothing
    waited = []
    lease.Lease(folder, waited.append).close()
    assert {one.pid for one in waited} == {holder.pid}
    assert 0 <= waited[0].age <= waited[-1].age < lease.LIFETIME


def test_what_was_stopped_for_too_long_knows_that_it_lost_its_lease(folder, monkeypatch):
    first = lease.Lease(folder)
    assert not first.is_lost
    with monkeypatch.context() as cut_off:
        cut_off.setattr(lease.Lease, "_touch", lambda self: None)
        time.sleep(lease.LIFETIME)
        second = lease.Lease(folder)
    deadline = time.monotonic() + 10
    while not first.is_lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.is_lost and not second.is_lost
    first.close()
    second.close()


@pytest.mark.parametrize("count", [8])
def test_of_many_that_come_at_once_one_holds_it(folder, count):
    held, taken = [], []

    def come():
        try:
            held.append(lease.Lease(folder))
        except lease.Taken as error:
            taken.append(error)

    threads = [threading.Thread(target=come) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(taken) == count - 1
    held[0].close()


def test_other_objects_in_the_folder_are_no_holders(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes").write_text("not of a lease")
    held = lease.Lease(folder)
    assert lease.is_leased(folder) and not held.is_lost
    held.close()


def test_a_folder_that_cannot_be_written_is_an_os_error(bucket):
    with pytest.raises(OSError, match="access"):
        lease.Lease("gs://locked/lease")
