"""Folders that appear complete or not at all; in a bucket, with the file that makes them complete last."""

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, leftovers, places
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


_RECORD, _FOLDER = "record.jsonl", "folder"

Entry = dict[str, Any]


class Work:
    """A folder that is being written.

    Args:
        place: Local folder of the work.
        identity: JSON-able. None if the work never goes on after a kill.

    Attributes:
        folder: Path of the folder, which holds what the finished parts have written, and perhaps more.
        aside: Path of a folder for other files, which is removed at the end.
        finished: Entries of the finished parts, in order.

    Raises:
        Refusal: the folder of the work belongs to another identity.
    """

    def __init__(self, place: pathlib.Path, identity: Entry | None = None):
        self.folder, self.aside, self._record = place / _FOLDER, place / "aside", place / _RECORD
        for folder in (place, self.folder, self.aside):
            if folder.is_symlink():  # what it leads to is not this command's
                raise Refusal(f"{folder} is a link, where this command writes its unfinished work; remove that link, "
                              "or name another folder.")
            folder.mkdir(parents=True, exist_ok=True)
        first, *self.finished = self._lines() or [None]
        if first is None:
            self._append(identity or {})
        elif first != identity:
            raise _other_work(place, first, identity)

    def finish(self, entry: Entry) -> None:
        """Records the next part, whose files are on disk."""
        self._append(entry)
        self.finished.append(entry)

    def _lines(self):
        """Returns the lines of the record. A kill may have cut the last one short."""
        json_lines.mend_end(self._record)
        if not self._record.exists():
            return []
        try:
            lines = [json_lines.loads(line) for line in self._record.read_bytes().splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) for line in lines):
            raise Refusal(f"{self._record} is damaged, so the work in its folder cannot go on; remove "
                          f"{self._record.parent} to begin anew.")
        return lines

    def _append(self, entry):
        with self._record.open("a") as file:
            file.write(json_lines.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _other_work(place, first, identity):
    different = [name for name in {**first, **identity} if first.get(name) != identity.get(name)]
    return Refusal(f"{place} is unfinished work on another {different[0]}; give the command that began it to go on, or "
                   "remove that folder to begin anew.")


@contextlib.contextmanager
def resumable_folder(folder: str | os.PathLike, marker: str, identity: Entry | None = None, num_bytes: int = 0,
                     ) -> Iterator[Work]:
    """Yields the work on a folder, which appears at the end.

    On a disk finished parts stay after a kill or an error of the system, such as a full disk, and the next work with
    the same identity goes on with them. A Refusal removes them. Without an identity, and in a bucket, an error leaves
    nothing behind.

    Args:
        folder: resolved path of a folder that does not exist yet, or is empty.
        marker: Name of a file in the folder, without which it is of no use.
        identity: JSON-able. Name -> value of all that determines the result. None for work that never goes on.
        num_bytes: Least size of the folder, for which the disk must have room.

    Raises:
        Refusal: the folder cannot be made, the disk has too little room, or there is work with another identity. Errors
            in the scope are not changed.
    """
    folder = places.at(folder)
    if not places.is_local(folder):
        with tempfile.TemporaryDirectory() as local:
            work = Work(pathlib.Path(local))
            _check_room(pathlib.Path(local), num_bytes)
            yield work
            with writing(folder):
                publish(work.folder, folder, marker)
        return
    place = folder.with_name(f".{folder.name}.{'' if identity else f'{secrets.token_hex(4)}.'}unfinished")
    with writing(folder):
        work = Work(place, identity)
    if work.finished:
        print(f"Going on with {place} (finished parts: {len(work.finished)}).", file=sys.stderr)
    is_kept = identity is not None
    try:
        _check_room(place, num_bytes)
        yield work
        with writing(folder):
            work.folder.replace(folder)
        is_kept = False
    except Refusal as error:
        is_kept = is_kept and isinstance(error.__cause__, OSError)
        raise
    finally:
        if not (is_kept and work.finished):
            shutil.rmtree(place, ignore_errors=True)


def _check_room(place, num_bytes):
    """Raises Refusal if the disk has no room for the rest of a folder that may be partly written."""
    missing = num_bytes - places.tree_size(place) - shutil.disk_usage(place).free
    if missing > 0:
        reason = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise Refusal(f"{place} needs {num_bytes / 1e9:,.1f} GB, and the disk has {missing / 1e9:,.1f} GB too few; "
                      "make room there, or use another folder.") from reason
