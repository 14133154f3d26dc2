"""Folders that appear complete or not at all; in a bucket, with the file that makes them complete last."""

import contextlib
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from switch_tf.storage import leftovers, places
from switch_tf.storage.whole_file import check_owned, put, writing


@contextlib.contextmanager
def whole_folder(folder: str | os.PathLike, marker: str) -> Iterator[pathlib.Path]:
    """Yields a local folder, which becomes `folder` at the end. An error leaves nothing behind.

    On a disk it is a hidden folder beside `folder`, which takes its name. Into a bucket its files are copied, the
    marker last, so that a reader who finds the marker finds the others.

    Args:
        folder: resolved path of a folder that does not exist yet, or is empty.
        marker: Name of a file in the folder, without which it is of no use.

    Raises:
        Refusal: an OSError kept the folder from being written.
    """
    folder = places.at(folder)
    if not places.is_local(folder):
        with tempfile.TemporaryDirectory() as local, writing(folder):
            yield pathlib.Path(local)
            publish(pathlib.Path(local), folder, marker)
        return
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with writing(folder):
            unfinished.mkdir(parents=True)
            yield unfinished
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def publish(local: pathlib.Path, folder: Any, marker: str) -> None:
    """Copies the files of a local folder into a folder of a bucket, the marker last, and none if that fails.

    Raises:
        OSError: A file cannot be written.
    """
    last = local / marker
    try:
        for file in sorted(file for file in local.rglob("*") if file.is_file() and file != last):
            check_owned(folder)
            places.copy(file, folder / file.relative_to(local).as_posix())
        put(folder / marker, last.read_bytes())
    except BaseException:
        leftovers.remove(folder)
        raise
