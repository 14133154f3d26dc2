"""Files that appear complete or not at all, and errors that name the file."""

import contextlib
import errno
import pathlib
import secrets
from collections.abc import Iterable, Iterator

# Cause and way out, by errno.
_WAYS_OUT = {
    errno.ENOSPC: "the disk is full: make room there",
    errno.EDQUOT: "your quota is used up: make room there",
    errno.ENOLCK: "the file system gives no locks: use a folder on a local disk, or mount it with locks",
    errno.EROFS: "the file system is read-only: use another folder",
    errno.EACCES: "use a folder that you may write, or change its rights",
    errno.EPERM: "use a folder that you may write, or change its rights",
    errno.ENOENT: "its folder is gone: put it back, or use another one",
}


class WriteError(OSError):
    """An OSError whose text names the file, the reason and the way out."""

    def __str__(self):
        way_out = _WAYS_OUT.get(self.errno, "use another folder, or mend that one")
        return f"{self.filename} could not be written ({self.strerror}); {way_out}."


@contextlib.contextmanager
def writing(path) -> Iterator[None]:
    """Within this scope an OSError becomes a `WriteError` that names the file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path, content: str | bytes | Iterable[bytes]) -> None:
    """Puts a file in the place of what is there, in one step, whoever else may write or read it.

    Args:
        path: of a file in a folder that is there.
        content: of the file, or its parts; text becomes UTF-8.

    Raises:
        WriteError: it cannot be written; what was there is untouched, and nothing is left beside it.
    """
    path = pathlib.Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    content = content.encode() if isinstance(content, str) else content
    with writing(path):
        try:
            if isinstance(content, bytes):
                unfinished.write_bytes(content)
            else:
                with open(unfinished, "wb") as file:
                    file.writelines(content)
            unfinished.replace(path)
        finally:
            with contextlib.suppress(OSError):  # the error that ended the writing says more
                unfinished.unlink(missing_ok=True)
