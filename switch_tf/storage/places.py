"""Paths of local files and of objects in buckets, which have pathlib's interface and raise OSErrors.

A path with a scheme, such as "gs://bucket/x", is one of etils.epath, which reaches it through TensorFlow. A bucket has
no folders, renames, appends or locks: an object appears whole when it has been written.
"""

import contextlib
import errno
import functools
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from switch_tf.refusals import Refusal

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
SCHEMES = ("gs", "s3", "az", "hf")  # of epath
# TensorFlow's errors by class name, which are no OSErrors.
_NUMBERS = {"NotFoundError": errno.ENOENT, "PermissionDeniedError": errno.EACCES,
            "UnauthenticatedError": errno.EACCES, "AlreadyExistsError": errno.EEXIST,
            "ResourceExhaustedError": errno.ENOSPC, "DeadlineExceededError": errno.ETIMEDOUT,
            "UnimplementedError": errno.ENOTSUP}
# Methods of a path that ask the bucket.
_METHODS = ("exists", "is_dir", "is_file", "iterdir", "glob", "mkdir", "open", "read_bytes", "read_text", "write_bytes",
            "write_text", "stat", "unlink", "rmtree", "copy")


def at(path: str | os.PathLike) -> Any:
    """Returns the path of a file or folder: a pathlib.Path of this machine, or one of a bucket.

    Raises:
        Refusal: It has an unknown scheme.
    """
    if isinstance(path, pathlib.PurePath):
        return path
    found = _SCHEME.match(os.fspath(path))
    if not found:
        return pathlib.Path(path)
    if found[1] not in SCHEMES:
        raise Refusal(f"{os.fspath(path)!r} has the scheme {found[1]!r}, which is unknown here; use gs:// or a folder "
                      "of this machine.")
    return _bucket_path()(path)


def is_local(path: str | os.PathLike) -> bool:
    """Returns whether a path is one of this machine's file system, which has renames and locks."""
    return not _SCHEME.match(os.fspath(path))


@functools.cache
def _bucket_path():
    """Returns the class of paths in buckets."""
    from etils import epath  # takes a fifth of a second

    kind = type(epath.Path("gs://bucket"))
    methods = {name: _raising_os_errors(getattr(kind, name)) for name in _METHODS}
    return type("BucketPath", (kind,), methods)


def _raising_os_errors(method):
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with os_errors(self):
            result = method(self, *args, **kwargs)
            if method.__name__ in ("iterdir", "glob"):
                return iter(list(result))
            return _Opened(result, self) if method.__name__ == "open" else result

    return call


class _Opened(contextlib.AbstractContextManager):
    """An open file of a bucket. It is written when its scope ends."""

    def __init__(self, opened, path):
        self._opened, self._path = opened, path

    def __enter__(self):
        with os_errors(self._path):
            return self._opened.__enter__()

    def __exit__(self, *error):
        with os_errors(self._path):
            return self._opened.__exit__(*error)


@contextlib.contextmanager
def os_errors(path: str | os.PathLike) -> Iterator[None]:
    """Raises errors of TensorFlow within this scope as OSErrors about a path."""
    try:
        yield
    except Exception as error:
        classes = [one.__name__ for one in type(error).__mro__]
        if "OpError" not in classes:
            raise
        number = next((_NUMBERS[name] for name in classes if name in _NUMBERS), errno.EIO)
        text = getattr(error, "message", str(error)).strip().partition("\n")[0]
        raise OSError(number, text, os.fspath(path)) from error


def size(path: str | os.PathLike) -> int:
    """Returns the bytes of a file."""
    place = at(path)
    return place.stat().st_size if is_local(place) else place.stat().length


def modified(path: str | os.PathLike) -> float:
    """Returns the time at which a file was written last, in seconds, by the clock of its store."""
    place = at(path)
    if is_local(place):
        return place.stat().st_mtime
    with os_errors(place):
        return _gfile().stat(os.fspath(place)).mtime_nsec / 1e9  # epath's own result has whole seconds


def _gfile():
    import tensorflow as tf  # takes seconds; a path of a bucket has imported it

    return tf.io.gfile


def is_link(path: str | os.PathLike) -> bool:
    """Returns whether a path is a symbolic link. A bucket has none."""
    return is_local(path) and pathlib.Path(path).is_symlink()


def move(source: str | os.PathLike, target: str | os.PathLike) -> Any:
    """Renames a file or folder and returns its new path. In a bucket every object of a folder is copied and removed."""
    source, target = at(source), at(target)
    if is_local(source):
        return source.rename(target)
    with os_errors(source):
        _gfile().rename(os.fspath(source), os.fspath(target))
    return target


def remove_tree(path: str | os.PathLike, ignore_errors: bool = False) -> None:
    """Removes a folder and everything in it."""
    place = at(path)
    if is_local(place):
        shutil.rmtree(place, ignore_errors=ignore_errors)
        return
    try:
        place.rmtree(missing_ok=True)
    except OSError:
        if not ignore_errors:
            raise


@contextlib.contextmanager
def fetched(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a file or folder as local ones, for libraries that read only those; a copy if it is in a bucket."""
    place = at(path)
    if is_local(place):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / place.name
        _copy_tree(place, copy)
        yield copy


def _copy_tree(source, target):
    if source.is_dir():
        target.mkdir()
        for entry in source.iterdir():
            _copy_tree(entry, target / entry.name)
    else:
        target.write_bytes(source.read_bytes())
