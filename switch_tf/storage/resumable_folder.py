"""Folders that appear complete or not at all, written in parts, so that a kill costs one part.

A folder `x` is written in the hidden `.x.unfinished`, where `record.jsonl` has a line with the identity of the work and
one for each finished part.
"""

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, leftovers, outputs, places
from switch_tf.storage.whole_file import check_owned, put, writing

Entry = dict


class Work:
    """An unfinished folder.

    Args:
        place: Local folder of the work.
        identity: See `resumable_folder`.

    Attributes:
        folder: The results so far.
        aside: Folder for temporary files.
        finished: Entries of the finished parts, in order.
    """

    def __init__(self, place: pathlib.Path, identity: Entry | None):
        self.folder, self.aside, self._record = place / "folder", place / "aside", place / "record.jsonl"
        for folder in (place, self.folder, self.aside):
            if folder.is_symlink():  # its target is not this command's
                raise Refusal(f"{folder} is a link, where this command writes its unfinished work; remove that link, "
                              "or name another folder.")
            folder.mkdir(parents=True, exist_ok=True)
        json_lines.mend_end(self._record)
        text = self._record.read_bytes() if self._record.exists() else b""
        try:
            lines: list[Any] = [json_lines.loads(line) for line in text.splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) for line in lines):
            raise Refusal(f"{self._record} is damaged, so the work in its folder cannot go on; remove "
                          f"{self._record.parent} to begin anew.")
        self.finished = lines[1:]
        if not lines:
            self._append(identity or {})
        elif lines[0] != identity:
            different = [name for name in {**lines[0], **identity} if lines[0].get(name) != identity.get(name)]
            raise Refusal(f"{place} is unfinished work on another {different[0]}; give the command that began it to "
                          "go on, or remove that folder to begin anew.")

    def finish(self, entry: Entry) -> None:
        """Records a part, after its files are on disk."""
        self._append(entry)
        self.finished.append(entry)

    def _append(self, entry):
        json_lines.append(self._record, [entry])
        with open(self._record, "rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def resumable_folder(folder: Any, marker: str, identity: Entry | None = None, num_bytes: int = 0,
                     ) -> Iterator[Work]:
    """Yields the Work on a folder that appears at the end.

    On a disk, finished parts survive a kill or an error of the system, such as a full disk, and the next work with the
    same identity resumes. A Refusal removes them. Without an identity, and in a bucket, an error removes everything.

    Args:
        folder: Resolved path of a folder that is absent or empty.
        marker: File that makes the folder complete.
        identity: JSON-able. Name -> value of all that determines the result. None for work that never resumes.
        num_bytes: Room that the disk must have.
    """
    is_local = places.is_local(folder)
    identity = identity if is_local else None
    place = folder.with_name(f".{folder.name}.{'' if identity else f'{secrets.token_hex(4)}.'}unfinished")
    place = place if is_local else pathlib.Path(tempfile.mkdtemp())
    work, is_kept = None, identity is not None
    try:
        with writing(folder):
            work = Work(place, identity)
        if work.finished:
            outputs.say(f"Going on with {place} (finished parts: {len(work.finished)}).")
        missing = num_bytes - places.tree_size(place) - shutil.disk_usage(place).free
        if missing > 0:
            raise Refusal(f"{place} needs {num_bytes / 1e9:,.1f} GB, and the disk has {missing / 1e9:,.1f} GB too few; "
                          "make room there, or use another folder.") from OSError(
                              errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield work
        with writing(folder):
            if is_local:
                work.folder.replace(folder)
            else:
                _upload(work.folder, folder, marker)
        is_kept = False
    except Refusal as error:
        is_kept = is_kept and isinstance(error.__cause__, OSError)
        raise
    finally:
        # If `Work` refused, the folder may hold other work. Without an identity it is always ours.
        if identity is None or work and not (is_kept and work.finished):
            shutil.rmtree(place, ignore_errors=True)


def _upload(source, folder, marker):
    try:
        for name, file in places.files_in(source):
            if name != marker:
                check_owned(folder)
                places.copy(file, folder / name)
        put(folder / marker, (source / marker).read_bytes())
    except BaseException:
        leftovers.remove(folder)
        raise
