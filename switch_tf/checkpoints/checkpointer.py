"""Saves and restores the checkpoints of a run.

A save copies this process's pieces of the variables to host memory, and writes the data position before it advances. A
thread does the rest. At most one save is under way.

A checkpoint is written under a temporary name and renamed, so a kill leaves older checkpoints intact. A bucket cannot
rename folders: files are uploaded under a unique name and renamed one by one, the description last. So a process that
slept while another took its run replaces no files.

Several processes synchronise through files, because a collective in a thread would mix with the collectives of the
steps. Each writes its part, then a small file that reports success or failure. The first process's thread waits for
these files, joins the parts and renames the folder.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from switch_tf import environment
from switch_tf.checkpoints import bundles, folders, tensors
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.data.batches import Batches
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import Piece, stored
from switch_tf.refusals import Outage, Refusal, first_line
from switch_tf.storage import json_lines, leftovers, places
from switch_tf.storage.whole_file import check_owned, owner_of, write_whole

# Seconds between looks for other processes' parts, on a disk and in a bucket.
_LOOK_PERIODS = (0.05, 1.0)
_GRACE = 5  # seconds
_ERRORS = (OSError, tf.errors.OpError, Refusal)  # of a save
_OTHER_FAILED = "another process could not write its part and names the cause"
_RENAMED = "renamed"  # folder of a bucket for files to rename at the end


class FailedSave(Refusal):
    """A checkpoint could not be written. Older checkpoints are unchanged.

    Attributes:
        sentence: The message without the way out.
    """

    def __init__(self, sentence: str, step: int):
        super().__init__(f"{sentence} Make room or rights there, then start the same command again.")
        self.sentence, self.step = sentence, step


class Checkpointer:
    """The checkpoints of a run. All processes call its methods together, except `settle`, `close` and `abandon`.

    `last` is the last saved step and its `time.time`, or None. The first process sets it when the checkpoint is
    complete, other processes in `wait`.

    Args:
        variables: See `tensors.state_variables`.
        keep, keep_every: See `folders.outdated`.
        configuration: From `continuation.record`.
    """

    def __init__(self, folder: Any, variables: tensors.Variables, batches: Batches,
                 partitioner: Partitioner | None = None, keep: int = 1, keep_every: int = 0,
                 configuration: dict | None = None):
        self._folder, self._variables, self._batches = folder, variables, batches
        self._partitioner = partitioner or Partitioner()
        self._keep, self._keep_every, self._configuration = keep, keep_every, configuration
        owner = owner_of(self._folder)
        self._token = self._partitioner.gather_texts(owner.token if owner else secrets.token_hex(8))[0]
        self._graph = functools.cache(lambda: bundles.object_graph(variables))
        self._under_way: Writing | None = None
        self._unsaved = None  # step of the last failed save
        self.last: tuple[int, float] | None = None

    def save(self, step: int, pending_metrics: dict | None = None, flush: Callable[[], None] = lambda: None) -> None:
        """Starts to write the checkpoint of a step, unless it exists, and then to remove outdated ones.

        Args:
            pending_metrics: JSON-able sums since the last logged step.
            flush: Writes the other files of the run first. Its OSError or Refusal fails the save.

        Raises:
            BrokenCheckpoint: A variable is not finite, so no file is written.
            FailedSave: The earlier save failed, or this one cannot begin.
        """
        if self._under_way is not None and self._under_way.step == step:
            return
        self.wait()
        flags = self._partitioner.are_finite(list(self._variables.values()))
        for path, is_finite in zip(self._variables, flags, strict=True):
            if not is_finite:
                raise BrokenCheckpoint(f"{path} is not finite at step {step}, so this step is not saved; the last good "
                                       f"checkpoint is step {max(folders.steps(self._folder), default=None)}.")
        final = folders.path_of(self._folder, step)
        if folders.is_complete(final):
            self._remove_outdated()  # a kill may have prevented that
            return
        index, count = self._partitioner.process_index, self._partitioner.num_processes
        with self._refusing(step):
            self._agree(self._attempt(lambda: make_empty(final, count, self._token))
                        if self._partitioner.is_chief else None, final)
        staging = staging_of(final)
        error = self._attempt(flush) or self._attempt(lambda: self._batches.save(staging, index))
        pieces = self._partitioner.pieces({path: stored(variable) for path, variable in self._variables.items()})
        description = bundles.describe(step, self._variables, pending_metrics, self._configuration, self._partitioner)

        def tidy():
            self.last = step, time.time()
            self._remove_outdated()

        self._under_way = Writing(final, staging, pieces, description, self._graph, index, count, self._token, tidy,
                                  error)

    def wait(self) -> None:
        """Waits until the save under way, if any, is complete in all processes.

        Raises:
            FailedSave: The save failed in any process.
        """
        under_way = self._under_way
        if under_way is None:
            return
        with self._refusing(under_way.step):
            # The processes agree before they wait for parts: only the agreement notices a lost process.
            under_way.has_part.wait()
            try:
                self._agree(under_way.part_error)
            except BaseException as error:
                self.abandon()
                if not self._partitioner.is_lost_process(error):
                    under_way.thread.join()
                raise
            under_way.thread.join()
            self._under_way = None
            self._agree(under_way.error, under_way.final)
            if not self._partitioner.is_chief:
                self.last = under_way.step, time.time()

    def settle(self) -> None:
        """Waits for this process's thread. Leaves a failure for `wait`."""
        if self._under_way is not None:
            self._under_way.thread.join()

    def close(self) -> None:
        """Waits for this process's thread, for a run that did not `wait`.

        Raises:
            FailedSave: The save under way failed.
        """
        self.settle()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with self._refusing(under_way.step):
                if error := under_way.part_error or under_way.error:
                    raise error

    def abandon(self) -> None:
        """Gives up the save under way, because another process is lost."""
        if self._under_way is not None:
            self._under_way.abandon()
            self._under_way = None

    def keep_best(self, best: Best, step: int, values: dict[str, float]) -> None:
        """Records the checkpoint of a step as the best once it is complete, unless its save failed.

        Raises:
            FailedSave: The save under way failed, or best.json cannot be written.
        """
        self.wait()
        if step == self._unsaved:
            return
        try:
            best.keep(step, values, self._partitioner.is_chief)
        except Refusal as error:
            raise FailedSave(f"Step {step} is the best one, but {first_line(error)}", step) from error

    def restore(self, checkpoint: Any, restarts_data: bool = False) -> dict:
        """Restores all variables and, unless the data restart, the data position, see `tensors.restore`."""
        self.wait()
        return tensors.restore(checkpoint, self._variables, None if restarts_data else self._batches)

    def _remove_outdated(self):
        if self._partitioner.is_chief:
            for old in folders.outdated(self._folder, self._keep, self._keep_every):
                folders.remove(old)

    def _attempt(self, write):
        """Returns the error of a function, so that all processes can fail together."""
        try:
            write()
        except _ERRORS as error:
            if self._partitioner.is_lost_process(error):
                raise
            return error
        return None

    def _agree(self, error, final=None):
        """Raises in all processes if any has an error."""
        if self._partitioner.any_process(error is not None):
            if final is not None and self._partitioner.is_chief:
                discard(final)
            raise error or OSError(_OTHER_FAILED)

    @contextlib.contextmanager
    def _refusing(self, step):
        try:
            yield
        except _ERRORS as error:
            if self._partitioner.is_lost_process(error):
                raise
            with contextlib.suppress(OSError):
                check_owned(self._folder)  # raises if another process took the run
            self._unsaved = step
            raise FailedSave(f"The checkpoint of step {step} could not be written to {self._folder} "
                             f"({first_line(error).rstrip('.')}); the older ones are as they were.", step) from error


def _temporary_of(final):
    return final.with_name(f"tmp.{final.name}") if places.is_local(final) else final


def make_empty(final: Any, num_processes: int, token: str) -> None:
    """Creates the folder for writing a checkpoint. One process needs none in a bucket."""
    temporary = _temporary_of(final)
    if temporary.exists():
        leftovers.remove(temporary)
    if num_processes > 1:
        (temporary / f"parts.{token}").mkdir(parents=True, exist_ok=True)
    elif places.is_local(final):
        temporary.mkdir(parents=True, exist_ok=True)


def staging_of(final: Any) -> pathlib.Path:
    """Returns the local folder for this process's files, a temporary one for a bucket.

    Removes the large folders of killed processes.
    """
    if places.is_local(final):
        return _temporary_of(final)
    prefix = f"switch_tf.{environment.visible_processes()}."
    for old in pathlib.Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if not environment.is_running(int(old.name.removeprefix(prefix).partition(".")[0])):
            shutil.rmtree(old, ignore_errors=True)
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}."))


def discard(final: Any) -> None:
    """Removes the files of a failed checkpoint, unless another process took the run."""
    with contextlib.suppress(OSError, Outage):  # the first error is more informative
        if _temporary_of(final).exists():
            leftovers.remove(_temporary_of(final))





@dataclasses.dataclass(eq=False)
class Writing:
    """A checkpoint that a thread is writing. The thread starts at once.

    Args:
        final: Checkpoint folder, after `make_empty`.
        staging: From `staging_of`, with the data position.
        pieces: Pieces that this process writes. The thread frees them.
        description: From `bundles.describe`.
        graph: Returns the `bundles.object_graph`.
        index: Index of this process.
        count: Number of processes.
        token: Unique to this run of the processes.
        tidy: The first process calls it on completion.
        part_error: Error that kept this process from writing its part.
        error: Error that kept the first process from completing the checkpoint.

    Attributes:
        has_part: Event. This process has written its part, or failed.
        thread: In the first process it ends when the checkpoint is complete or has failed.
    """

    final: Any
    staging: pathlib.Path
    pieces: list[Piece]
    description: dict
    graph: Callable[[], bytes]
    index: int
    count: int
    token: str
    tidy: Callable[[], None]
    part_error: BaseException | None
    error: BaseException | None = None

    def __post_init__(self):
        self.step = self.description["step"]
        self._is_local, self._temporary = places.is_local(self.final), _temporary_of(self.final)
        self._parts = self._temporary / f"parts.{self.token}"  # shared by all processes
        self._name = f"part_{self.index:05d}"
        self.has_part, self._is_abandoned = threading.Event(), threading.Event()
        # A daemon: the checkpointer waits for it unless another process is lost.
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def abandon(self) -> None:
        """Stops waiting for the parts of other processes.

        Leaves the thread some seconds, in case all parts exist.
        """
        self._is_abandoned.set()
        self.thread.join(_GRACE)

    def _run(self):
        sums = self._write_part()
        self.has_part.set()
        if self.index:
            return
        try:
            if self.count > 1:
                sums = self._join_parts()
            if self.part_error is not None:
                raise self.part_error
            self._publish(sums)
        except BaseException as error:  # raised again in the main thread
            self.error = error
            discard(self.final)

    def _write_part(self):
        pieces, self.pieces = self.pieces, []
        sums = {}
        place = self.staging / self._parts.name / self._name if self.count > 1 else self.staging / "state"
        try:
            if self.part_error is None:
                place.parent.mkdir(exist_ok=True)
                if bundles.write(place, pieces, None if self.index else self.graph()):
                    file = bundles.data_file(place)
                    sums = {file.name: bundles.sum_of(file)}
                for relative, file in [] if self._is_local else places.files_in(self.staging):
                    if relative == file.name:
                        places.copy(file, self._parts / _RENAMED / relative)
                        sums[relative] = sums.get(relative) or bundles.sum_of(file)
                    else:
                        places.copy(file, self._parts / file.name)
                if self.count > 1:  # read only when whole
                    write_whole(self._parts / f"{self._name}.json", json_lines.dumps(sums))
        except BaseException as error:
            self.part_error = error
        if not self._is_local:
            shutil.rmtree(self.staging, ignore_errors=True)
        if self.part_error is not None and self.count > 1:
            self._report_failure()
        return sums

    def _report_failure(self):
        try:
            (self._parts / f"{self._name}.failed").write_text("")
        except OSError as error:  # the main threads agree on it
            error.__context__ = self.part_error
            self.part_error = error

    def _join_parts(self):
        names = [f"part_{index:05d}" for index in range(self.count)]
        while True:
            listing = {entry.name for entry in self._parts.iterdir()}
            if all({f"{name}.json", f"{name}.failed"} & listing for name in names):
                break
            if self._is_abandoned.wait(_LOOK_PERIODS[not self._is_local]):
                raise OSError(_OTHER_FAILED)
        if self.part_error is not None:
            raise self.part_error
        if any(f"{name}.failed" in listing for name in names):
            raise OSError(_OTHER_FAILED)
        known, written = {}, {}
        for name in names:
            report = json_lines.loads((self._parts / f"{name}.json").read_bytes())
            if entry := report.pop(bundles.data_file(self._parts / name).name, None):
                written[self._parts / name] = entry
            known |= report
        return known | bundles.join(list(written), list(written.values()), self._temporary / "state")

    def _publish(self, sums):
        if not self._is_local:
            for file in (self._parts / _RENAMED).iterdir():
                check_owned(self.final)
                file.rename(self._temporary / file.name)
        if self.count > 1:
            leftovers.remove(self._parts)
        bundles.complete(self._temporary, self.description, sums)
        if self._is_local:
            check_owned(self.final)
            leftovers.make_room(self.final, is_folder=True)
            os.rename(self._temporary, self.final)
            bundles.sync(self.final.parent)
        self.tidy()
