"""Local files and objects in buckets, as paths with pathlib's interface that raise OSErrors.

A bucket has no folders, renames, appends or locks: an object appears whole once it is written.

TensorFlow has no conditional writes. tensorstore sends the generation of the object that was read, so a process cannot
overwrite a newer object of another process, however long it slept.
"""

import contextlib
import errno
import functools
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
import types
from collections.abc import Iterator
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.storage import outputs

Place = str | os.PathLike

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_BUCKETS = "gs"
OF_PATTERNS = set("*?[]\\")  # TensorFlow takes them for a pattern
_PART = 2**24  # bytes to copy at a time
_BLOCK = 2**16  # bytes of a sample
# "gs:/bucket/x" is a mistake, or went through pathlib. One letter may name a drive.
_ONE_SLASH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
# Statuses of TensorFlow and tensorstore -> errno.
_NUMBERS = {"NOTFOUND": errno.ENOENT, "PERMISSIONDENIED": errno.EACCES, "UNAUTHENTICATED": errno.EACCES,
            "ALREADYEXISTS": errno.EEXIST, "RESOURCEEXHAUSTED": errno.ENOSPC, "DEADLINEEXCEEDED": errno.ETIMEDOUT,
            "UNIMPLEMENTED": errno.ENOTSUP}
# As TensorFlow's client, for up to three minutes.
_RETRIES = {"max_retries": 10, "initial_delay": "1s", "max_delay": "32s"}
# Methods of a path that ask the bucket.
_METHODS = ("exists", "is_dir", "is_file", "iterdir", "glob", "mkdir", "open", "write_bytes",
            "write_text", "unlink", "rename")


class BucketError(OSError):
    """A bucket that does not answer, or refuses. The object's state is unknown."""


class Conflict(Exception):
    """Another process has changed the object since it was read."""


class Literal:
    """A path as text for TensorFlow's checkpoint readers, because they match patterns: `run[1]` reads `run1`.

    A local folder is named by a descriptor that stays open while this object lives.
    """

    def __init__(self, path: pathlib.Path):
        self._text, self._folder = str(path), None
        if is_local(path) and OF_PATTERNS & set(self._text) and path.parent.is_dir():
            self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            self._text = f"/proc/self/fd/{self._folder}/{path.name}"

    def __str__(self):
        return self._text

    def __del__(self):
        if self._folder is not None:
            os.close(self._folder)


def at(path: Place) -> Any:
    """Returns a pathlib.Path, or a path in a bucket."""
    if isinstance(path, pathlib.PurePath):
        return path
    match = _SCHEME.match(os.fspath(path))
    if not match:
        return pathlib.Path(path)
    if match[1] != _BUCKETS:
        raise Refusal(f"{os.fspath(path)!r} has the scheme {match[1]!r}, which is unknown here; use gs:// or a folder "
                      "of this machine.")
    return _bucket_path()(path)


def is_supported(path: Place) -> bool:
    """Whether `at` accepts a path and would not make it a local folder named "gs:"."""
    text = os.fspath(path)
    if match := _SCHEME.match(text):
        return match[1] == _BUCKETS and text.rstrip("/") != f"{match[1]}:"
    return "://" not in text and not _ONE_SLASH.match(text.lstrip())


def is_local(path: Place) -> bool:
    """Whether a path is in this machine's file system."""
    return not _SCHEME.match(os.fspath(path))


@functools.cache
def _bucket_path():
    from etils import epath  # takes a fifth of a second

    kind = type(epath.Path("gs://bucket"))
    methods = {name: _raising_os_errors(getattr(kind, name)) for name in _METHODS}
    # Buckets have no relative paths or links. epath's `stat` has other names and whole seconds.
    methods |= {"resolve": lambda self, strict=False: self, "absolute": lambda self: self,
                "is_symlink": lambda self: False, "stat": _stat, "read_bytes": _read_bytes,
                "read_text": lambda self, encoding="utf-8", errors="strict": self.read_bytes().decode(encoding, errors)}
    return type("BucketPath", (kind,), methods)


def _stat(self):
    import tensorflow as tf  # takes seconds; a bucket's path has imported it

    with os_errors(self):
        stat = tf.io.gfile.stat(os.fspath(self))
    return types.SimpleNamespace(st_size=stat.length, st_mtime=stat.mtime_nsec / 1e9)


def _read_bytes(self, part=None):
    """TensorFlow's content would be up to five seconds old."""
    if (content := read_object(self, part)[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self))
    return content


def _raising_os_errors(method):
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with os_errors(self):
            result = method(self, *args, **kwargs)
            if method.__name__ in ("iterdir", "glob"):
                return iter(list(result))
            return _opened(result, self) if method.__name__ == "open" else result

    return call


@contextlib.contextmanager
def _opened(opened, path):
    """A bucket's file is written when its scope ends."""
    with os_errors(path), opened as file:
        yield file


@contextlib.contextmanager
def os_errors(path: Place) -> Iterator[None]:
    """Raises TensorFlow's errors within this scope as OSErrors, and for a bucket as BucketErrors.

    A missing file is a FileNotFoundError in either.
    """
    try:
        yield
    except Exception as error:
        statuses = [one.__name__.removesuffix("Error").upper() for one in type(error).__mro__]
        if "OP" not in statuses:
            raise
        text = getattr(error, "message", str(error)).strip().partition("\n")[0]
        number = next((_NUMBERS[status] for status in statuses if status in _NUMBERS), errno.EIO)
        kind = OSError if is_local(path) or number == errno.ENOENT else BucketError  # OSError itself chooses a subclass
        raise kind(number, text, os.fspath(path)) from error


def raise_failure(error: BaseException, path: Place) -> None:
    """Raises a BucketError for a bucket's error that does not mean damaged contents."""
    kinds = {one.__name__ for one in type(error).__mro__}
    if not is_local(path) and ("BucketError" in kinds or "OpError" in kinds and not kinds & {
            "NotFoundError", "DataLossError", "OutOfRangeError", "InvalidArgumentError"}):
        with os_errors(path):
            raise error


def size(path: Place) -> int:
    """Returns the bytes of a file."""
    return at(path).stat().st_size


def content(path: Any, largest: int) -> bytes:
    """Returns the bytes of a regular file. A pipe could block, and a device never end.

    Raises:
        ValueError: It is no regular file, or has more than `largest` bytes. The text is half a sentence.
        OSError: It does not exist or cannot be read.
    """
    if is_local(path) and path.exists() and not path.is_file():  # a bucket has only files
        raise ValueError("it is no file")
    if size(path) > largest:
        raise ValueError(f"it is larger than {largest} bytes")
    return path.read_bytes()


def sample(path: Place, budget: int) -> str:
    """Returns the SHA-256 of a file, or of evenly spaced blocks if it exceeds a budget of bytes."""
    length, digest = size(path), hashlib.sha256()
    count = max(1, min(-(-length // _BLOCK), budget // _BLOCK))
    with at(path).open("rb") as file:
        for index in range(count):
            file.seek(index * max(0, length - _BLOCK) // max(1, count - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def tree_size(folder: Any) -> int:
    """Returns the bytes of a folder."""
    return sum(tree_size(entry) if entry.is_dir() else size(entry) for entry in folder.iterdir())


def files_in(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Returns the relative names and paths of all files below a local folder, sorted."""
    return [(file.relative_to(folder).as_posix(), file) for file in sorted(folder.rglob("*")) if file.is_file()]


def copy(source: pathlib.Path, target: Any) -> None:
    """Copies a local file into a bucket."""
    with os_errors(target), open(source, "rb") as file, target.open("wb") as opened:
        shutil.copyfileobj(file, opened, _PART)


@contextlib.contextmanager
def fetched(path: Place) -> Iterator[pathlib.Path]:
    """Yields a local file for libraries that cannot read buckets: the file itself, or a copy."""
    place = at(path)
    if is_local(place):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / place.name
        copy.write_bytes(place.read_bytes())
        yield copy


@contextlib.contextmanager
def uploaded(folder: Place) -> Iterator[pathlib.Path]:
    """Yields a local folder for libraries that cannot write buckets: the folder itself, or one uploaded at the end."""
    place = at(folder)
    if is_local(place):
        yield place
        return
    with tempfile.TemporaryDirectory() as local:
        yield pathlib.Path(local)
        upload(pathlib.Path(local), place)


def upload(folder: pathlib.Path, target: Any) -> None:
    """Copies a local folder into a bucket."""
    for name, file in files_in(folder):
        copy(file, target / name)


@functools.cache
def _bucket(name):
    # Certificates that the user gave TensorFlow's client.
    if "CURL_CA_BUNDLE" in os.environ:
        os.environ.setdefault("TENSORSTORE_CA_BUNDLE", os.environ["CURL_CA_BUNDLE"])
    import tensorstore  # takes a fifth of a second

    return tensorstore.KvStore.open({"driver": "gcs", "bucket": name, "path": "",
                                     "context": {"gcs_request_retries": _RETRIES}}).result()


def store_of(folder: Place) -> dict:
    """Returns tensorstore's specification of a folder."""
    if is_local(folder):
        return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}
    bucket, name = _split(folder)
    return (_bucket(bucket) / f"{name}/").spec(unbind_context=True).to_json()


def root(path: Place) -> str:
    """Returns the URL of a path's bucket."""
    return f"{_BUCKETS}://{_split(path)[0]}"


def _split(path):
    bucket, _, name = os.fspath(path).removeprefix("gs://").partition("/")
    return bucket, name


def _call(path, operation):
    bucket, name = _split(path)
    # The first request prints where it looked for credentials.
    is_first = not _bucket.cache_info().currsize
    try:
        with outputs.held_back() if is_first else contextlib.nullcontext():
            return operation(_bucket(bucket), name).result()
    except ValueError as error:  # every status of tensorstore
        raise bucket_failure(error, path) from error


def bucket_failure(error: ValueError, path: Place) -> BucketError:
    """Returns the error for a status of tensorstore."""
    status, _, text = str(error).partition(": ")
    return BucketError(_NUMBERS.get(status.replace("_", ""), errno.EIO),
                       re.sub(r"\s*\[http_.*", "", text, flags=re.DOTALL), os.fspath(path))


def read_object(path: Place, part: slice | None = None) -> tuple[bytes | None, bytes]:
    """Returns an object's content or part, None if it is missing, and its generation for `write_object`.

    Raises:
        BucketError: The bucket does not answer, refuses or does not exist.
    """
    result = _call(path, lambda bucket, name: bucket.read(name, byte_range=part))
    return (result.value if result.state == "value" else None), result.stamp.generation


def urls_of(folder: Place) -> list[str]:
    """Returns the URLs of all objects below a folder, including placeholders of folders, which end in "/".

    Raises:
        BucketError: See `read_object`.
    """
    import tensorstore

    # All names that begin with the folder: "0" follows "/".
    keys = _call(os.fspath(folder).rstrip("/"),
                 lambda bucket, name: bucket.list(tensorstore.KvStore.KeyRange(f"{name}/", f"{name}0")))
    return [f"gs://{_split(folder)[0]}/{key.decode()}" for key in keys]


def write_object(path: Place, content: bytes | None, generation: bytes | None) -> bytes:
    """Writes an object, or removes it if the content is None. Returns its new generation.

    Args:
        generation: From `read_object` or `write_object`. None overwrites any.

    Raises:
        Conflict: Another process has written or removed it.
        BucketError: See `read_object`.
    """
    if new := _call(path, lambda bucket, name: bucket.write(name, content, if_equal=generation)).generation:
        return new
    stored, new = read_object(path)
    if stored != content:
        raise Conflict(os.fspath(path))
    return new  # the answer to an earlier try was lost
