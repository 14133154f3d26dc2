"""One process at a time writes an output, whether that is a file or a folder, on a disk or in a bucket."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from switch_tf.refusals import Refusal
from switch_tf.storage import lease, places

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(output: str | os.PathLike, argument: str = "--output") -> Iterator[None]:
    """Locks an output within this scope, with a hidden file beside it. The lock ends with its process, even if killed.

    In a bucket it is a lease, which another process can take a minute after a kill.

    Args:
        output: path of a file or folder, which need not exist.
        argument: str. The option that names it, for the messages.

    Raises:
        Refusal: another process writes it, nothing can be written beside it, or the file system has no locks.
    """
    output = places.at(output)
    if not places.is_local(output):
        with _leased(output, argument):
            yield
        return
    place = output.resolve()
    file = place.with_name(f".{place.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            while True:
                lock = stack.enter_context(open(file, "a+"))
                _lock(lock, output, argument)
                if _is_still(lock, file):
                    break
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        except OSError as error:
            raise _unwritable(output, argument, error) from error
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _leased(output, argument):
    try:
        held_lease = lease.Lease(output.with_name(f".{output.name}.lock"))
    except lease.Taken as taken:
        raise Refusal(f"Another process ({taken}) is writing {str(output)!r}; wait for it, stop it, or name another "
                      f"{argument}. One that was killed is forgotten {lease.LIFETIME:.0f} s later.") from None
    except OSError as error:
        raise _unwritable(output, argument, error) from error
    try:
        yield
    finally:
        held_lease.close()


def _unwritable(output, argument, error):
    return Refusal(f"{argument} {str(output)!r} cannot be written ({error.strerror}); name another one.")


def _lock(lock, output, argument):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise Refusal(f"Another process (pid {owner}) is writing {str(output)!r}; wait for it, stop it, or name "
                      f"another {argument}.") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise Refusal(f"The file system of {str(output)!r} has no locks ({error.strerror}), so two processes could "
                      f"write there at a time; name another {argument}, on a local disk.") from error


def _is_still(lock, file):
    """Returns whether the locked file still has that name: the previous owner may just have removed it."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(file))
    except FileNotFoundError:
        return False
