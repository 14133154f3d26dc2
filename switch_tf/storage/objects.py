"""Objects of a bucket that are written or removed only if they are as they were read, which TensorFlow cannot do.

tensorstore sends Google's store the generation of the object with the request, so that no process can overwrite what
another one has written since, however long it slept in between.
"""

import contextlib
import errno
import functools
import os
import re
from collections.abc import Callable
from typing import Any

from switch_tf.storage import outputs

Place = str | os.PathLike

# As TensorFlow's client: ten tries, for up to three minutes.
_RETRIES = {"max_retries": 10, "initial_delay": "1s", "max_delay": "32s"}
_NUMBERS = {"NOT_FOUND": errno.ENOENT, "PERMISSION_DENIED": errno.EACCES, "UNAUTHENTICATED": errno.EACCES,
            "RESOURCE_EXHAUSTED": errno.ENOSPC, "DEADLINE_EXCEEDED": errno.ETIMEDOUT}


class BucketError(OSError):
    """A bucket that does not answer, or refuses to. What is in it is neither missing nor damaged for that reason."""


class Conflict(Exception):
    """The object is not the one that was read: somebody else has written or removed it."""


@functools.cache
def _bucket(name):
    # Certificates that a user gives TensorFlow's client.
    if "CURL_CA_BUNDLE" in os.environ:
        os.environ.setdefault("TENSORSTORE_CA_BUNDLE", os.environ["CURL_CA_BUNDLE"])
    import tensorstore  # takes a fifth of a second

    return tensorstore.KvStore.open({"driver": "gcs", "bucket": name, "path": "",
                                     "context": {"gcs_request_retries": _RETRIES}}).result()


def store_of(folder: Place) -> dict[str, Any]:
    """Returns tensorstore's specification of a folder, of this machine or of a bucket."""
    text = os.path.abspath(folder) if "://" not in os.fspath(folder) else os.fspath(folder).removeprefix("gs://")
    if text.startswith("/"):
        return {"driver": "file", "path": f"{text}/"}
    bucket, _, name = text.partition("/")
    return (_bucket(bucket) / f"{name}/").spec(unbind_context=True).to_json()


def _call(path, operation: Callable[[Any, str], Any]) -> Any:
    """Returns the result of an operation on the bucket of a path and the name of its object.

    Raises:
        BucketError: The bucket does not answer, refuses or does not exist.
    """
    bucket, _, name = os.fspath(path).removeprefix("gs://").partition("/")
    # The first request writes to standard error where it looked for credentials.
    is_first = not _bucket.cache_info().currsize
    try:
        with outputs.held_back() if is_first else contextlib.nullcontext():
            return operation(_bucket(bucket), name).result()
    except ValueError as error:  # every status of tensorstore
        raise failure(error, path) from error


def failure(error: ValueError, path: Place) -> BucketError:
    """Returns the error of a bucket for a status of tensorstore."""
    number = _NUMBERS.get(str(error).partition(":")[0], errno.EIO)
    text = re.sub(r"\s*\[http_.*", "", str(error).partition(": ")[2], flags=re.DOTALL)
    return BucketError(number, text, os.fspath(path))


def read(path: Place, part: slice | None = None) -> tuple[bytes | None, bytes]:
    """Returns the content of an object or a part of it, None if there is none, and its generation for `write`.

    Raises:
        BucketError: The bucket does not answer, refuses or does not exist.
    """
    found = _call(path, lambda bucket, name: bucket.read(name, byte_range=part))
    return (found.value if found.state == "value" else None), found.stamp.generation


def urls_of(folder: Place) -> list[str]:
    """Returns the URLs of all objects in a folder and its folders, and those that stand for folders and end in "/".

    Raises:
        BucketError: The bucket does not answer, refuses or does not exist.
    """
    import tensorstore

    folder = os.fspath(folder).rstrip("/")
    # All names that begin with the folder's: "0" follows "/".
    found = _call(folder, lambda bucket, name: bucket.list(tensorstore.KvStore.KeyRange(f"{name}/", f"{name}0")))
    bucket = folder.removeprefix("gs://").partition("/")[0]
    return [f"gs://{bucket}/{key.decode()}" for key in found]


def write(path: Place, content: bytes | None, generation: bytes | None) -> bytes:
    """Writes an object, or removes it if the content is None. Returns its new generation.

    Args:
        path: Path of the object.
        content: Its new content.
        generation: Generation that `read` or `write` returned. None writes or removes any.

    Raises:
        Conflict: Somebody else has written or removed it.
        BucketError: The bucket does not answer, refuses or does not exist.
    """
    if new := _call(path, lambda bucket, name: bucket.write(name, content, if_equal=generation)).generation:
        return new
    found, new = read(path)
    if found != content:
        raise Conflict(os.fspath(path))
    return new  # the answer to an earlier try was lost
