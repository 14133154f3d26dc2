"""Locks on a disk and leases in a bucket, with which one process at a time writes a run folder or an output.

`whole_file` writes a locked path's files through its lock, and a bucket refuses to overwrite an object that another
process has changed (`places`). So a process that lost its lease while it slept cannot write.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from switch_tf import environment
from switch_tf.refusals import Outage, Refusal
from switch_tf.storage import json_lines, leftovers, outputs, places, whole_file
from switch_tf.storage.places import Place

PERIOD = 15.0  # seconds between two renewals
LIFETIME = 60.0  # seconds without a renewal after which another process takes the lease
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Lock:
    """Exclusive use of a file or folder, until `close` or the end of the process.

    Args:
        path: File or folder to use. It need not exist.
        place: Path of the lock.
        doing: Verb for messages, as in "is training in".
        argument: Option that gives the path.
        thing: Noun for the path.

    Attributes:
        token: Unique to this lock.

    Raises:
        OSError: The lock cannot be written.
    """

    def __init__(self, path: Any, place: Any, doing: str = "training in", argument: str = "MODEL_DIR",
                 thing: str = "run folder"):
        self._path, self._place, self._doing, self._argument, self._thing = path, place, doing, argument, thing
        self.token = secrets.token_hex(8)
        self._is_local = places.is_local(place)
        self._loss = ""  # why this process no longer owns the path
        self._generations = {}  # of objects that this process may overwrite
        # A long upload must not keep the lease from being renewed.
        self._writing, self._changing, self._ended = threading.Lock(), threading.RLock(), threading.Event()
        if self._is_local:
            self._lock_file()
        else:
            self._take_lease()
            self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
            self._thread.start()
        whole_file.own(path, self)

    def check(self) -> None:
        """Checks that the path still belongs to this process.

        Raises:
            Outage: Another process took it, or it was removed or replaced.
            OSError: The bucket does not answer.
        """
        with self._changing:
            if not self._loss:
                if self._is_local and not self._is_same_file():
                    self._loss = self.removed()
                elif not self._is_local and _now() > self._renewed + LIFETIME / 2:
                    self._renew()
            if self._loss:
                raise Outage(self._loss)

    def replace(self, path: Any, content: bytes | None) -> None:
        """Writes an object in a bucket, or removes it if `content` is None, while `check` passes."""
        with self._writing:
            key = os.fspath(path)
            while True:
                if key not in self._generations:
                    _, self._generations[key] = places.read_object(path)
                self.check()  # after reading the generation, because another owner's write changes it
                try:
                    self._generations[key] = places.write_object(path, content, self._generations[key])
                    return
                except places.Conflict:
                    del self._generations[key]
                    self._renew()

    def close(self) -> None:
        """Releases the path."""
        whole_file.disown(self._path, self)
        if self._is_local:
            self._file.close()
            return
        self._ended.set()
        self._thread.join(timeout=PERIOD)
        with self._changing, contextlib.suppress(places.Conflict, OSError):  # the lease expires anyway
            if not self._loss:
                places.write_object(self._place, None, self._lease)

    def _taken(self, owner):
        return Refusal(f"Another process ({owner}) is {self._doing} {str(self._path)!r}; wait for it, stop it, or "
                       f"name another {self._argument}.")

    def removed(self) -> str:
        """Returns the message about a path that is gone."""
        return (f"The {self._thing} {str(self._path)!r} was removed or replaced while this process was "
                f"{self._doing} it, so nothing can be saved there any more; start again, and leave it in place.")

    def _lock_file(self):
        leftovers.make_room(self._place)
        patience = iter((0.1, 0.1))  # `is_held` holds it briefly
        while True:
            # Unbuffered, because closing the file would write a buffer to a full disk again.
            self._file = open(self._place, "ab+", buffering=0)  # noqa: SIM115  held until the process ends
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                owner = self._file.read(64).decode(errors="replace").strip()
                self._file.close()
                wait = next(patience, None)
                if wait is None:
                    raise self._taken(f"pid {owner or 'unknown'}") from None
                time.sleep(wait)
            except OSError as error:
                self._file.close()
                if error.errno not in _NO_LOCKS:
                    raise
                raise Refusal(f"The file system of {str(self._path)!r} has no locks ({error.strerror}), so two "
                              f"processes could write there at a time; name another {self._argument}, on a "
                              "local disk, or mount that file system with locks.") from error
            else:
                if self._is_same_file():  # not one that its owner just removed
                    break
                self._file.close()
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def _is_same_file(self):
        try:
            return os.path.samestat(os.stat(self._place), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _take_lease(self):
        self._text = json_lines.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": self.token,
                                 "processes": environment.visible_processes()}).encode()
        watched, until = b"", 0.0
        while True:
            self._renewed = _now()
            content, generation = places.read_object(self._place)
            owner = _owner(content)
            if owner is not None:
                if generation != watched:
                    if watched:
                        raise self._taken(owner)
                    watched, until = generation, _now() + LIFETIME
                    outputs.say(f"{self._path} was used by another process ({owner}), which may have been killed; "
                                   f"waiting up to {LIFETIME:.0f} s for a sign of life.")
                if _now() < until:
                    time.sleep(min(PERIOD, LIFETIME) / 3)
                    continue
            with contextlib.suppress(places.Conflict):  # another process was faster
                self._lease = places.write_object(self._place, self._text, generation)
                return

    def _renew(self):
        with self._changing:
            if self._loss:
                return
            before = _now()
            try:
                self._lease = places.write_object(self._place, self._text, self._lease)
                self._renewed = before
            except places.Conflict:
                content, _ = places.read_object(self._place)
                if content is None:
                    self._loss = self.removed()
                else:
                    owner = _owner(content)
                    self._loss = (f"Another process{f' ({owner})' if owner else ''} has taken the {self._thing} "
                                  f"{str(self._path)!r}, because this one was cut off from it or suspended for over a "
                                  "minute, so nothing is saved there any more; let the other one go on.")

    def _keep(self):
        while not self._loss and not self._ended.wait(PERIOD):
            with contextlib.suppress(OSError):  # tried again; `check` reports it
                self._renew()


def _now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # also counts while the machine sleeps


def _owner(content):
    """None if the owner has ended on this machine."""
    try:
        described = json_lines.loads(content or b"")
        pid, host = int(described["pid"]), str(described["host"])
        is_here = described["processes"] == environment.visible_processes()
    except (ValueError, KeyError, TypeError, OverflowError):  # no lease, such as a lock copied from a disk
        return None
    return None if is_here and not environment.is_running(pid) else f"pid {pid} on {host}"


def is_held(place: Any) -> bool:
    """Whether a process has a lock, for a lease by this machine's clock. True if unknown."""
    try:
        if not places.is_local(place):
            return _owner(places.read_object(place)[0]) is not None and time.time() - place.stat().st_mtime < LIFETIME
        with open(place, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def held(output: Place, argument: str = "--output") -> Iterator[Lock]:
    """Locks an output, present or not, within this scope, with a hidden file next to it."""
    output = places.at(output)
    resolved = output.resolve()
    place = resolved.with_name(f".{resolved.name}.lock")
    try:
        if places.is_local(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(output, place, "writing", argument, "output")
    except OSError as error:
        raise Refusal(f"{argument} {str(output)!r} cannot be written ({error.strerror}); name another one.") from error
    try:
        yield lock
    finally:
        if places.is_local(place):
            with contextlib.suppress(OSError):  # keeps the error that ended the scope
                if lock._is_same_file():
                    place.unlink(missing_ok=True)
        lock.close()
