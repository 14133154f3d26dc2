"""One process at a time uses a folder of a bucket, which has no locks.

A process puts an object of its own into the folder and renews another one beside it while it lives. Of the objects that
are still renewed the oldest holds the lease. All times are the store's own, so the clocks of machines do not matter.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from switch_tf import environment
from switch_tf.storage import places

PERIOD = 15.0  # seconds between two renewals
LIFETIME = 60.0  # seconds after the last renewal until another process takes the lease
# Seconds in which an object that was written earlier is listed, and gets an earlier time, wherever it was written.
_SETTLING = 1.0
_RENEWED = ".renewed"


class Holder(NamedTuple):
    """A process with an object in the folder.

    Attributes:
        token: Name of its object.
        since: Time at which it was written, in seconds of the store's clock.
        age: Seconds since it was renewed.
        host, pid: Machine and process, "" and 0 if unknown.
        is_here: Whether this process would see that one if it runs.
    """

    token: str
    since: float
    age: float
    host: str
    pid: int
    is_here: bool

    @property
    def is_alive(self) -> bool:
        """Whether it may still run."""
        if self.is_here and not environment.is_running(self.pid):
            return False
        return self.age < LIFETIME


def is_leased(folder: Any) -> bool:
    """Returns whether a process has the lease of a folder, by this machine's clock. True if that is unknown."""
    folder = places.at(folder)
    try:
        ages = [time.time() - places.modified(entry) for entry in folder.iterdir() if entry.name.endswith(_RENEWED)]
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(age < LIFETIME for age in ages)


class Taken(Exception):
    """Another process holds the lease.

    Attributes:
        holder: Holder.
    """

    def __init__(self, holder: Holder):
        super().__init__(f"process {holder.pid} on {holder.host}")
        self.holder = holder


class Lease:
    """The lease of a folder, from its construction until `close` or the end of the process.

    Args:
        folder: Folder of a bucket for the lease's objects alone.
        wait: Function called with the Holder, again and again, while another process has the lease. It raises an
            exception, or returns to wait for it.

    Raises:
        Taken: Another process has the lease, and `wait` is None.
        OSError: The folder cannot be read or written.
    """

    def __init__(self, folder: Any, wait: Callable[[Holder], None] | None = None):
        self._folder = places.at(folder)
        self._token = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._is_lost = False
        self._ended = threading.Event()
        self._write()
        try:
            self._acquire(wait)
        except BaseException:
            self._remove(self._token)
            raise
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _write(self):
        if places.is_local(self._folder):  # in a bucket a folder would be an object of its own, and stay
            self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(),
                           "processes": environment.visible_processes()})
        (self._folder / self._token).write_text(text)
        (self._folder / f"{self._token}{_RENEWED}").write_text(text)

    def _acquire(self, wait):
        time.sleep(_SETTLING)
        while (first := self._first()).token != self._token:
            if wait is None:
                raise Taken(first)
            wait(first)
            time.sleep(min(PERIOD, LIFETIME) / 3)
            self._touch()

    def _first(self):
        """Returns the holder that comes first, this process's own at the latest, and removes those that ended."""
        self._touch()
        now = places.modified(self._folder / f"{self._token}{_RENEWED}")
        names = {entry.name for entry in self._folder.iterdir()}
        holders = [self._holder(name, now) for name in names if not name.endswith(_RENEWED)]
        for holder in holders:
            if not holder.is_alive and holder.token != self._token:
                self._remove(holder.token)
        return min((holder for holder in holders if holder.is_alive or holder.token == self._token),
                   key=lambda holder: (holder.since, holder.token))

    def _holder(self, token, now):
        file = self._folder / token
        try:
            since = places.modified(file)
            described = json.loads(file.read_text())
            return Holder(token, since, now - places.modified(self._folder / f"{token}{_RENEWED}"),
                          str(described["host"]), int(described["pid"]),
                          described["processes"] == environment.visible_processes())
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # it is being removed, or is no object of a lease
            return Holder(token, float("inf"), float("inf"), "", 0, False)

    def _touch(self):
        (self._folder / f"{self._token}{_RENEWED}").write_text("")

    def _renew(self):
        """Renews the object until the lease ends. One that is gone was taken for dead by another process."""
        while not self._ended.wait(PERIOD):
            try:
                if not (self._folder / self._token).exists():
                    self._is_lost = True
                    return
                self._touch()
            except OSError:  # tried again; after LIFETIME another process may take the lease, which is noticed then
                continue

    @property
    def is_lost(self) -> bool:
        """Whether another process took the lease, because this one was stopped or cut off for too long."""
        return self._is_lost

    def close(self) -> None:
        """Gives the lease back."""
        self._ended.set()
        self._thread.join(timeout=PERIOD)
        if not self._is_lost:
            self._remove(self._token)

    def _remove(self, token):
        for name in (token, f"{token}{_RENEWED}"):
            (self._folder / name).unlink(missing_ok=True)
