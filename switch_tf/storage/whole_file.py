"""Files that appear complete or not at all, on a disk or in a bucket, and refusals that name the file."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator

from switch_tf.refusals import Refusal
from switch_tf.storage import places

# Cause and way out, by errno.
_WAYS_OUT = {
    errno.ENOSPC: "the disk is full: make room there",
    errno.EDQUOT: "your quota is used up: make room there",
    errno.ENOLCK: "the file system gives no locks: use a folder on a local disk, or mount it with locks",
    errno.EROFS: "the file system is read-only: use another folder",
    errno.EACCES: "use a folder that you may write, or change its rights",
    errno.EPERM: "use a folder that you may write, or change its rights",
    errno.ENOENT: "its folder is gone: put it back, or use another one",
    errno.ETIMEDOUT: "the store did not answer in time: try again, or use another folder",
}


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turns an OSError within this scope into a Refusal that names the file, the reason and the way out."""
    try:
        with places.os_errors(path):
            yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno, "use another folder, or mend that one")
        raise Refusal(f"{path} could not be written ({error.strerror or error}); {way_out}.") from error


@contextlib.contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Turns an OSError within this scope into a Refusal that names the file and the reason."""
    try:
        with places.os_errors(path):
            yield
    except OSError as error:
        raise Refusal(f"{path} could not be read ({error.strerror or error}); mend its rights, or use another copy."
                      ) from error


def write_whole(path: str | os.PathLike, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file atomically, also while other processes read or write it.

    Args:
        path: Path of the file. Its folder exists.
        content: Content of the file, whole or in parts. Text is encoded as UTF-8.

    Raises:
        Refusal: The file cannot be written. Its old content stays, and no temporary file does.
    """
    place = places.at(path)
    content = content.encode() if isinstance(content, str) else content
    with writing(place):
        if not places.is_local(place):  # an object of a bucket appears whole
            place.write_bytes(content if isinstance(content, bytes) else b"".join(content))
            return
        unfinished = place.with_name(f".{place.name}.{secrets.token_hex(4)}.unfinished")
        try:
            if isinstance(content, bytes):
                unfinished.write_bytes(content)
            else:
                with open(unfinished, "wb") as file:
                    file.writelines(content)
            unfinished.replace(place)
        finally:
            with contextlib.suppress(OSError):  # the error that ended the writing says more
                unfinished.unlink(missing_ok=True)
