"""Writes files of records that appear whole, each record readable without its neighbours."""

import contextlib
import errno
from collections.abc import Iterable
from typing import Any

from etils import epy

from switch_tf.data import cache_manifest
from switch_tf.storage.whole_file import writing, written

with epy.lazy_imports():  # only caches and stored predictions need it
    from array_record.python import array_record_module


def write_records(path: Any, records: Iterable[bytes]) -> dict[str, Any]:
    """Writes a new file and returns its "bytes" and "sha256".

    Raises:
        Refusal: The file cannot be written. Errors of the iterable pass on.
    """
    with contextlib.ExitStack() as stack:
        with writing(path), _os_errors():
            unfinished = stack.enter_context(written(path))
            writer = array_record_module.ArrayRecordWriter(str(unfinished), "group_size:1")
        try:
            for record in records:
                with writing(path), _os_errors():
                    writer.write(record)
        finally:
            with writing(path), _os_errors():
                writer.close()
        sums = {"bytes": unfinished.stat().st_size, "sha256": cache_manifest.checksum(unfinished)}
        with writing(path):
            stack.close()
    return sums


@contextlib.contextmanager
def _os_errors():
    try:
        yield
    except RuntimeError as error:  # every failure of the writer
        number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, str(error).partition(";")[0].removeprefix("write() failed: ")) from error
