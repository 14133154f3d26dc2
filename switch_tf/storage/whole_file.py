"""Files that appear complete or not at all, on a disk or in a bucket, and refusals that name the file."""

import contextlib
import errno
import functools
import os
import pathlib
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from switch_tf.refusals import Outage, Refusal
from switch_tf.storage import places
from switch_tf.storage.places import Place

# Seconds between uploads, longer if they take over a twentieth of the time.
UPLOAD_PERIOD = 15.0
_LONGEST = 60.0
_SHARE = 20
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


# Path -> `lock.Lock`. Weak, so that a lock ends with its holder.
_owners = weakref.WeakValueDictionary()


def _key(path):
    return os.path.abspath(path) if places.is_local(path) else os.fspath(path).rstrip("/")


def own(path: Place, owner: Any) -> None:
    """Declares that a path belongs to this process while its owner's `check` passes."""
    _owners[_key(path)] = owner


def disown(path: Place, owner: Any) -> None:
    """Ends what `own` declared."""
    if _owners.get(_key(path)) is owner:
        del _owners[_key(path)]


def owner_of(path: Place) -> Any:
    """Returns the innermost owner of a path, of a folder above it, or of a file whose name it extends by ".x"."""
    key = _key(path)
    owned = [start for start in list(_owners) if key == start or key.startswith((f"{start}/", f"{start}."))]
    return _owners.get(max(owned, key=len)) if owned else None


def check_owned(path: Place) -> None:
    """Raises Outage if this process has lost its lock of a path."""
    if owner := owner_of(path):
        owner.check()


@contextlib.contextmanager
def _refusing(verb, ways_out, otherwise, path):
    """Turns an OSError within this scope into a Refusal with the file, the reason and the way out."""
    try:
        with places.os_errors(path):
            yield
    except OSError as error:
        raise Refusal(f"{path} could not be {verb} ({error.strerror or error}); "
                      f"{ways_out.get(error.errno, otherwise)}.") from error


# Scopes of a path: `with writing(path):`.
writing = functools.partial(_refusing, "written", _WAYS_OUT, "use another folder, or mend that one")
reading = functools.partial(_refusing, "read", {}, "mend its rights, or use another copy")


def write_whole(path: Place, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file atomically, also while other processes read or write it.

    A failure keeps the old content. The folder must exist. Text is encoded as UTF-8.
    """
    with writing(path):
        put(path, content)


def put(path: Place, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file as `write_whole` does.

    Raises:
        OSError: The file cannot be written.
        Outage: This process has lost its lock of the path.
    """
    parts = [content.encode() if isinstance(content, str) else content] if isinstance(content, str | bytes) else content
    place = places.at(path)
    if places.is_local(place):
        with written(place) as unfinished, open(unfinished, "wb") as file:
            file.writelines(parts)
    elif owner := owner_of(place):  # an object appears whole, and needs no room on this machine
        owner.replace(place, b"".join(parts))
    else:
        place.write_bytes(b"".join(parts))


@contextlib.contextmanager
def written(path: Place) -> Iterator[pathlib.Path]:
    """Yields a temporary local file that becomes `path` at the end. Raises as `put`."""
    place = places.at(path)
    hidden = f".{place.name}.{secrets.token_hex(4)}.unfinished"
    unfinished = place.with_name(hidden) if places.is_local(place) else pathlib.Path(tempfile.gettempdir(), hidden)
    try:
        yield unfinished
        if places.is_local(place):
            check_owned(place)
            unfinished.replace(place)
        elif owner := owner_of(place):
            owner.replace(place, unfinished.read_bytes())
        else:  # an object appears whole
            places.copy(unfinished, place)
    finally:
        with contextlib.suppress(OSError):  # keeps the error that ended the writing
            unfinished.unlink(missing_ok=True)


def remove(path: Any) -> None:
    """Removes a file or a link, if it exists. Raises as `put`."""
    owner = owner_of(path)
    if owner and not places.is_local(path):
        owner.replace(path, None)
        return
    check_owned(path)
    path.unlink(missing_ok=True)


def remove_tree(folder: Any) -> None:
    """Removes a folder. In a bucket, objects that another process adds meanwhile stay. Raises as `put`."""
    urls = [] if places.is_local(folder) else places.urls_of(folder)
    check_owned(folder)
    if places.is_local(folder):
        shutil.rmtree(folder)
    for url in urls:
        places.write_object(url, None, None)


class Mirror:
    """A local folder, copied into a folder of a bucket within a minute.

    Attributes:
        local: Path of the local folder. Its files may grow.
    """

    def __init__(self, folder: Any):
        self._folder = places.at(folder)
        self._temporary = tempfile.TemporaryDirectory()
        self.local = pathlib.Path(self._temporary.name)
        self._sizes = {}  # in the bucket
        self._uploading, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def fetch(self, name: str) -> pathlib.Path:
        """Returns the local path of a file, downloaded if it is in the bucket.

        Raises:
            OSError: The file cannot be read. Uploads end.
        """
        local = self.local / name
        try:
            if (self._folder / name).is_file():
                self._sizes[local] = local.write_bytes((self._folder / name).read_bytes())
        except BaseException:
            self._ended.set()
            raise
        return local

    def flush(self) -> None:
        """Uploads all changes. Raises as `put`."""
        with self._uploading:
            for name, file in places.files_in(self.local):
                if (size := file.stat().st_size) != self._sizes.get(file):
                    put(self._folder / name, file.read_bytes())
                    self._sizes[file] = size

    def close(self) -> None:
        """Uploads all changes, and removes the local folder. Raises as `put`."""
        self._ended.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            self._temporary.cleanup()

    def _run(self):
        wait = UPLOAD_PERIOD
        while not self._ended.wait(wait):
            started = time.monotonic()
            # The next checkpoint flushes and reports errors, also a lost lock.
            with contextlib.suppress(OSError, Outage):
                self.flush()
            wait = min(max(UPLOAD_PERIOD, _SHARE * (time.monotonic() - started)), _LONGEST)
