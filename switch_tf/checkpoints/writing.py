"""Writes one checkpoint in a thread, from a snapshot in host memory, while training goes on.

A checkpoint is complete or absent: it is written under a temporary name and renamed, so a kill or a full disk leaves
the older ones intact. Several processes meet through files alone, because a collective in a thread would mix with those
of the steps: each writes its part and then a file that it is there, or that it failed. The thread of the first process
waits for these files, joins the parts and renames the folder.
"""

import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

from switch_tf.checkpoints import bundles, descriptions
from switch_tf.partitioning.pieces import Piece
from switch_tf.storage import leftovers

_LOOK_PERIOD = 0.05  # seconds between looks for the parts of other processes


def temporary_of(final: pathlib.Path) -> pathlib.Path:
    """Returns the folder in which a checkpoint is written."""
    return final.with_name(f"tmp.{final.name}")


def make_empty(final: pathlib.Path) -> None:
    """Creates the folder in which a checkpoint is written, for all processes."""
    temporary = temporary_of(final)
    shutil.rmtree(temporary, ignore_errors=True)
    _parts_of(temporary).mkdir(parents=True)


def discard(final: pathlib.Path) -> None:
    """Removes what was written of a checkpoint that failed."""
    shutil.rmtree(temporary_of(final), ignore_errors=True)


def _parts_of(temporary):
    return temporary / "parts"


class Writing:
    """A checkpoint that a thread is writing. The thread starts at once.

    Args:
        final: path of the checkpoint folder. Its temporary folder exists and has the position in the data.
        pieces: Pieces of variables that this process writes. The thread frees them.
        description: From `descriptions.describe`.
        graph: Function that returns `bundles.object_graph` of the variables.
        process: Index of this process, and the number of processes.
        tidy: Function that the first process calls when the checkpoint is complete.
        error: Error that this process has met already, or None. Then it only tells the first process.

    Attributes:
        step: The step that is saved.
        part_error: Error that kept this process from writing its part, or None.
        error: Error that kept the first process from completing the checkpoint, or None.
    """

    def __init__(self, final: pathlib.Path, pieces: list[Piece], description: dict[str, Any],
                 graph: Callable[[], bytes], process: tuple[int, int], tidy: Callable[[], None],
                 error: BaseException | None = None):
        self.step: int = description["step"]
        self.part_error, self.error = error, None
        self._final, self._temporary = final, temporary_of(final)
        self._pieces, self._description, self._graph, self._tidy = pieces, description, graph, tidy
        self._index, self._count = process
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
        """Makes the first process wait no longer for parts of the others, one of which is lost or has failed."""
        self._is_abandoned.set()

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
        prefix = self._part(self._index) if self._count > 1 else self._temporary / "state"
        sums = None
        try:
            if self.part_error is None:
                graph = self._graph() if self._index == 0 else None
                sums = {}
                if bundles.write(prefix, pieces, graph):
                    file = bundles.data_file(prefix)
                    sums = {file.name: descriptions.sum_of(file)}
                if self._count > 1:
                    _write_report(prefix, sums)
        except BaseException as error:
            self.part_error = error
        if self.part_error is not None and self._count > 1:
            self._report_failure(prefix)
        return sums

    def _report_failure(self, prefix):
        try:
            prefix.with_name(f"{prefix.name}.failed").touch()
        except OSError as error:  # the main threads will agree on it
            error.__context__ = self.part_error
            self.part_error = error

    def _part(self, index):
        return _parts_of(self._temporary) / f"part_{index:05d}"

    def _join_parts(self):
        """Waits for all parts, joins them and returns the sums of their files."""
        reports = self._await_reports()
        if self.part_error is not None:
            raise self.part_error
        if None in reports:
            raise OSError("another process could not write its part and names the cause")
        written = [(self._part(index), report) for index, report in enumerate(reports) if report]
        prefix = self._temporary / "state"
        bundles.join([part for part, _ in written], prefix)
        return {bundles.data_file(prefix, index, len(written)).name: report[bundles.data_file(part).name]
                for index, (part, report) in enumerate(written)}

    def _await_reports(self):
        """Returns the report of each process, None for those that failed."""
        folder, names = _parts_of(self._temporary), [self._part(index).name for index in range(self._count)]
        while True:
            found = {entry.name for entry in folder.iterdir()}
            if all({f"{name}.json", f"{name}.failed"} & found for name in names):
                return [None if f"{name}.failed" in found else json.loads((folder / f"{name}.json").read_text())
                        for name in names]
            if self._is_abandoned.wait(_LOOK_PERIOD):
                raise OSError("another process could not write its part and names the cause")

    def _publish(self, sums):
        shutil.rmtree(_parts_of(self._temporary))
        descriptions.complete(self._temporary, self._description, sums)
        leftovers.make_room(self._final, is_folder=True)
        os.rename(self._temporary, self._final)
        descriptions.sync(self._final.parent)
        self._tidy()


def _write_report(prefix, sums):
    """Writes a file that the part of a process is complete, so that nobody reads half of it."""
    unfinished = prefix.with_name(f"{prefix.name}.unfinished")
    unfinished.write_text(json.dumps(sums))
    os.replace(unfinished, prefix.with_name(f"{prefix.name}.json"))
