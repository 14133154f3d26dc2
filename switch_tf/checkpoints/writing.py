"""Writes one checkpoint in a thread, from a snapshot in host memory, while training goes on.

A checkpoint is complete or absent: it is written under a temporary name and renamed, so a kill or a full disk leaves
the older ones intact. A bucket has no renames of folders: there all files are uploaded under a name that no other
process uses and renamed one by one, and the description is written last, without which there is no checkpoint. So a
process that slept while another one took its run replaces none of its files. Several processes meet through files,
because a collective in a thread would mix with those of the steps: each writes its part, and then a small file that
reports success or failure. The thread of the first process waits for these files, joins the parts and renames the
folder.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from switch_tf import environment
from switch_tf.checkpoints import bundles, descriptions
from switch_tf.partitioning.variables import Piece
from switch_tf.refusals import Outage
from switch_tf.storage import leftovers, places
from switch_tf.storage.whole_file import check_owned, write_whole

# Seconds between looks for the parts of other processes, on a disk and in a bucket.
_LOOK_PERIODS = (0.05, 1.0)
_GRACE = 5  # seconds
_RENAMED = "renamed"  # folder for files of a bucket that get their names at the end


def _temporary_of(final):
    """Returns the folder in which a checkpoint is written."""
    return final.with_name(f"tmp.{final.name}") if places.is_local(final) else final


def make_empty(final: Any, num_processes: int, token: str) -> None:
    """Creates the folder in which a checkpoint is written, for all processes. A single one needs none in a bucket."""
    temporary = _temporary_of(final)
    if temporary.exists():
        leftovers.remove(temporary)
    if num_processes > 1:
        _parts_of(temporary, token).mkdir(parents=True, exist_ok=True)
    elif places.is_local(final):
        temporary.mkdir(parents=True, exist_ok=True)


def staging_of(final: Any) -> pathlib.Path:
    """Returns the local folder to which this process writes its files: a new one for a checkpoint in a bucket.

    Those that killed processes left are removed, since each is as large as a checkpoint.
    """
    if places.is_local(final):
        return _temporary_of(final)
    prefix = f"switch_tf.{environment.visible_processes()}."
    for old in pathlib.Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if not environment.is_running(int(old.name.removeprefix(prefix).partition(".")[0])):
            shutil.rmtree(old, ignore_errors=True)
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}."))


def discard(final: Any) -> None:
    """Removes what was written of a checkpoint that failed, unless the run was taken by another process."""
    with contextlib.suppress(OSError, Outage):  # the error that failed it says more
        if _temporary_of(final).exists():
            leftovers.remove(_temporary_of(final))


def _parts_of(temporary, token):
    """Returns the folder for the parts of all processes, which no other run of these processes has."""
    return temporary / f"parts.{token}"


def _part_name(index):
    return f"part_{index:05d}"


class Writing:
    """A checkpoint that a thread is writing. The thread starts at once.

    Args:
        final: path of the checkpoint folder, for which `make_empty` was called.
        staging: From `staging_of`, with the position in the data.
        pieces: Pieces of variables that this process writes. The thread frees them.
        description: From `descriptions.describe`.
        graph: Function that returns `bundles.object_graph` of the variables.
        process: Index of this process, and the number of processes.
        token: Text that no other run of these processes has.
        tidy: Function that the first process calls when the checkpoint is complete.
        error: Error that this process has met already, or None. The thread then only reports the failure.

    Attributes:
        step: The step that is saved.
        part_error: Error that kept this process from writing its part, or None.
        error: Error that kept the first process from completing the checkpoint, or None.
    """

    def __init__(self, final: Any, staging: pathlib.Path, pieces: list[Piece], description: dict[str, Any],
                 graph: Callable[[], bytes], process: tuple[int, int], token: str,
                 tidy: Callable[[], None], error: BaseException | None = None):
        self.step: int = description["step"]
        self.part_error, self.error = error, None
        self._final, self._temporary, self._staging = final, _temporary_of(final), staging
        self._is_local = places.is_local(final)
        self._pieces, self._description, self._graph, self._tidy = pieces, description, graph, tidy
        self._index, self._count = process
        # The parts folder that all processes share, and the local one of this process.
        self._parts, self._own_parts = _parts_of(self._temporary, token), _parts_of(self._staging, token)
        self._has_part, self._is_abandoned = threading.Event(), threading.Event()
        # Not waited for when the interpreter ends: `join` does, unless another process is lost.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_part(self) -> None:
        """Waits until this process has written its part, or failed."""
        self._has_part.wait()

    def join(self) -> None:
        """Waits for the thread. In the first process, that is the end of the checkpoint."""
        self._thread.join()

    def abandon(self) -> None:
        """Stops waiting for the parts of other processes, because one of them is lost or has failed.

        If all parts are there, some seconds are left to complete the checkpoint.
        """
        self._is_abandoned.set()
        self._thread.join(_GRACE)

    def _run(self):
        sums = self._write_part()
        self._has_part.set()
        if self._index:
            return
        try:
            if self._count > 1:
                sums = self._join_parts()
            if self.part_error is not None:
                raise self.part_error
            self._publish(sums)
        except BaseException as error:  # raised again in the main thread
            self.error = error
            discard(self._final)

    def _write_part(self):
        """Returns the sums of the files of this process, {} if it wrote none, or None if it failed."""
        pieces, self._pieces = self._pieces, []
        place = self._own_parts / _part_name(self._index) if self._count > 1 else self._staging / "state"
        sums = None
        try:
            if self.part_error is None:
                graph = self._graph() if self._index == 0 else None
                sums = {}
                place.parent.mkdir(exist_ok=True)
                if bundles.write(place, pieces, graph):
                    file = bundles.data_file(place)
                    sums = {file.name: descriptions.sum_of(file)}
                if not self._is_local:
                    sums |= self._upload(sums)
                if self._count > 1:
                    self._report(sums)
        except BaseException as error:
            self.part_error = error
        if not self._is_local:
            shutil.rmtree(self._staging, ignore_errors=True)
        if self.part_error is not None and self._count > 1:
            self._report_failure()
        return sums

    def _upload(self, known):
        """Copies the files of this process into the bucket. Returns the sums of final files that are not yet known."""
        sums = {}
        for file in sorted(file for file in self._staging.rglob("*") if file.is_file()):
            if file.parent == self._staging:
                places.copy(file, self._parts / _RENAMED / file.name)
                sums[file.name] = known.get(file.name) or descriptions.sum_of(file)
            else:
                places.copy(file, self._parts / file.name)
        return sums

    def _report(self, sums):
        """Writes a file that the part of this process is complete. Nobody reads half of it."""
        write_whole(self._parts / f"{_part_name(self._index)}.json", json.dumps(sums))

    def _report_failure(self):
        try:
            (self._parts / f"{_part_name(self._index)}.failed").write_text("")
        except OSError as error:  # the main threads will agree on it
            error.__context__ = self.part_error
            self.part_error = error

    def _join_parts(self):
        """Waits for all parts, joins them and returns the sums of their files."""
        reports = self._await_reports()
        if self.part_error is not None:
            raise self.part_error
        if None in reports:
            raise OSError("another process could not write its part and names the cause")
        parts, prefix = self._parts, self._temporary / "state"
        known, written = {}, []
        for index, report in enumerate(reports):
            part = parts / _part_name(index)
            if (entry := report.pop(bundles.data_file(part).name, None)) is not None:
                written.append((part, entry))
            known |= report
        bundles.join([part for part, _ in written], prefix)
        return known | {bundles.data_file(prefix, index, len(written)).name: entry
                        for index, (_, entry) in enumerate(written)}

    def _await_reports(self):
        """Returns the report of each process, None for those that failed."""
        folder, names = self._parts, [_part_name(index) for index in range(self._count)]
        while True:
            found = {entry.name for entry in folder.iterdir()}
            if all({f"{name}.json", f"{name}.failed"} & found for name in names):
                return [None if f"{name}.failed" in found else json.loads((folder / f"{name}.json").read_text())
                        for name in names]
            if self._is_abandoned.wait(_LOOK_PERIODS[not self._is_local]):
                raise OSError("another process could not write its part and names the cause")

    def _publish(self, sums):
        if not self._is_local:
            for file in (self._parts / _RENAMED).iterdir():
                check_owned(self._final)
                places.move(file, self._temporary / file.name)
        if self._count > 1:
            leftovers.remove(self._parts)
        descriptions.complete(self._temporary, self._description, sums)
        if self._is_local:
            check_owned(self._final)
            leftovers.make_room(self._final, is_folder=True)
            os.rename(self._temporary, self._final)
            descriptions.sync(self._final.parent)
        self._tidy()
