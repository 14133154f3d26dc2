"""One process at a time trains in a run folder: by a lock on a disk, by a lease in a bucket."""

import fcntl
import os
import sys
import time
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.storage import leftovers, output_lock, places
from switch_tf.storage.lease import LIFETIME, Holder, Lease, is_leased

_NAME = "lock"


def hold(folder: Any) -> "FileLock | FolderLease":
    """Locks a run folder until `close` or the end of the process.

    Args:
        folder: Path of an existing folder.

    Raises:
        Refusal: Another process trains there, or the file system has no locks.
        OSError: The folder cannot be written.
    """
    return FileLock(folder) if places.is_local(folder) else FolderLease(folder)


def is_held(folder: Any) -> bool:
    """Returns whether a process holds a run folder. True if that is unknown."""
    path = places.at(folder) / _NAME
    if not places.is_local(path):
        return is_leased(path)
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _taken(owner, folder):
    return Refusal(f"Another process ({owner}) is training in {str(folder)!r}; wait for it, stop it, or choose another "
                   "MODEL_DIR.")


class FileLock:
    """The lock of a folder on a disk. It is released when its process ends for any reason.

    Args:
        folder: Path of the folder.

    Raises: See `hold`.
    """

    def __init__(self, folder: Any):
        self._folder, self._path = folder, folder / _NAME
        leftovers.make_room(self._path)
        self._file = open(self._path, "a+")  # noqa: SIM115  held until the process ends
        for patience in (0.1, 0.1, None):  # `is_held` holds it briefly
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if patience is None:
                    self._file.seek(0)
                    raise _taken(f"pid {self._file.read(64).strip() or 'unknown'}", folder) from None
                time.sleep(patience)
            except OSError as error:
                if error.errno not in output_lock.NO_LOCKS:
                    raise
                raise Refusal(f"{self._path} cannot be locked ({error.strerror}), so two processes could train in one "
                              "folder; choose a MODEL_DIR on a local disk, or mount that file system with locks."
                              ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def is_kept(self) -> bool:
        """Returns whether the folder is still the one that was locked: it was not removed, moved or replaced."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Releases the folder for another process."""
        self._file.close()


class FolderLease:
    """The lease of a folder in a bucket. After a kill, a process on another machine waits a minute for it.

    Args:
        folder: Path of the folder.

    Raises: See `hold`.
    """

    def __init__(self, folder: Any):
        self._folder, self._last_age = folder, -1.0
        if (folder / _NAME).is_file():  # the lock of a run that was copied from a disk, beside the lease's objects
            (folder / _NAME).unlink(missing_ok=True)
        self._lease = Lease(folder / _NAME, self._wait)

    def _wait(self, holder: Holder):
        """Waits for the lease of a process that does not renew it, as after a kill; refuses if it does."""
        owner = f"pid {holder.pid} on {holder.host}"
        if holder.age < self._last_age:
            raise _taken(owner, self._folder)
        if self._last_age < 0:
            print(f"{self._folder} was used by another process ({owner}), which may have been killed; waiting up to "
                  f"{LIFETIME:.0f} s for a sign of life.", file=sys.stderr, flush=True)
        self._last_age = holder.age

    def is_kept(self) -> bool:
        """Returns whether no other process has taken the folder meanwhile, for example while this one was suspended."""
        return not self._lease.is_lost

    def close(self) -> None:
        """Releases the folder for another process."""
        self._lease.close()
