"""Saves and restores the checkpoints of a run. Saving goes on in a thread, while the run trains.

A save copies this process's pieces of the variables to host memory, so later steps do not change them, and writes the
small position in the data at once, because that moves on. A thread does the rest, see `writing.py`. At most one save
is under way: the next one waits for it, and so does everything that needs its files.
"""

import contextlib
import functools
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from switch_tf.checkpoints import bundles, descriptions, folders, tensors, writing
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.folders import BrokenCheckpoint, outdated, path_of, steps
from switch_tf.data.batches import Batches
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import stored
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places, whole_file


class FailedSave(Refusal):
    """A checkpoint that could not be written. The older ones are as they were.

    Attributes:
        sentence: The message without the way out.
        step: The step of the checkpoint.
    """

    def __init__(self, sentence: str, step: int):
        super().__init__(f"{sentence} Make room or rights there, then start the same command again.")
        self.sentence, self.step = sentence, step


class Checkpointer:
    """The checkpoints of a run. All processes call its methods together, except `settle`, `close` and `abandon`.

    `last` is the step that was saved last, and its time by `time.time`; None before that. The first process sets it
    when the checkpoint is complete, the others when they have waited for it.

    Args:
        folder: path of the run's `checkpoints` folder.
        variables: path -> Keras variable, see `tensors.state_variables`.
        batches: data.Batches with the next training batches.
        partitioner: Partitioner. Defaults to one device.
        keep, keep_every: int, see `folders.outdated`.
        configuration: JSON-able, from `continuation.record`.
    """

    def __init__(self, folder: str | pathlib.Path, variables: tensors.Variables, batches: Batches,
                 partitioner: Partitioner | None = None, keep: int = 1, keep_every: int = 0,
                 configuration: dict | None = None):
        self._folder, self._variables, self._batches = places.at(folder), variables, batches
        self._partitioner = partitioner or Partitioner()
        self._keep, self._keep_every, self._configuration = keep, keep_every, configuration
        # All processes write their parts of a checkpoint into a folder that the owner of the run names.
        owner = whole_file.owner_of(self._folder)
        self._token = self._partitioner.gather_texts(owner.token if owner else secrets.token_hex(8))[0]
        self._graph = functools.cache(lambda: bundles.object_graph(variables))
        self._under_way: writing.Writing | None = None
        self._unsaved: int | None = None  # the step of the last save that failed
        self.last: tuple[int, float] | None = None

    def save(self, step: int, pending_metrics: dict | None = None, flush: Callable[[], None] = lambda: None) -> None:
        """Starts to write the checkpoint of a step, unless it exists, and to remove outdated ones after that.

        Waits for an earlier save of another step first.

        Args:
            step: int.
            pending_metrics: JSON-able sums since the last logged step, or None.
            flush: function that writes the other files of the run, which have to be there if the checkpoint is. Its
                OSError or Refusal is one of the save.

        Raises:
            BrokenCheckpoint: a variable is not finite. Nothing is written.
            FailedSave: the earlier save failed, or this one cannot begin.
        """
        if self._under_way is not None and self._under_way.step == step:
            return
        self.wait()
        self._check_finite(step)
        final = path_of(self._folder, step)
        if folders.is_complete(final):
            self._remove_outdated()  # a kill may have prevented that
            return
        process = self._partitioner.process_index, self._partitioner.num_processes
        with self._refusing(step):
            self._agree(self._attempt(lambda: writing.make_empty(final, process[1], self._token))
                        if self._partitioner.is_chief else None, final)
        staging = writing.staging_of(final)
        error = self._attempt(flush) or self._attempt(lambda: self._batches.save(staging, process[0]))
        pieces = self._partitioner.pieces({path: stored(variable) for path, variable in self._variables.items()})
        description = descriptions.describe(step, self._variables, pending_metrics, self._configuration,
                                            self._partitioner)
        self._under_way = writing.Writing(final, staging, pieces, description, self._graph, process,
                                          self._token, functools.partial(self._tidy, step), error)

    def wait(self) -> None:
        """Waits until the save under way, if any, is complete in all processes.

        Raises:
            FailedSave: it failed, in this process or another one: the disk is full or not writable.
        """
        under_way = self._under_way
        if under_way is None:
            return
        final = path_of(self._folder, under_way.step)
        with self._refusing(under_way.step):
            # The first process would wait in vain for the part of a process that is lost, which a collective notices.
            under_way.wait_for_part()
            try:
                self._agree(under_way.part_error)
            except BaseException as error:
                under_way.abandon()
                if not self._partitioner.is_lost_process(error):
                    under_way.join()
                self._under_way = None
                raise
            under_way.join()
            self._under_way = None
            self._agree(under_way.error, final)
            if not self._partitioner.is_chief:
                self.last = under_way.step, time.time()

    def settle(self) -> None:
        """Waits for the thread of this process alone. A failure stays for `wait`."""
        if self._under_way is not None:
            self._under_way.join()

    def close(self) -> None:
        """Ends a run that did not `wait`: waits for the thread of this process alone.

        Raises:
            FailedSave: it failed.
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
        """Declares the checkpoint of a step the best one, as soon as it is complete, unless it could not be saved.

        Raises:
            FailedSave: it could not be saved, or best.json cannot be written.
        """
        self.wait()
        if step == self._unsaved:
            return
        try:
            best.keep(step, values, self._partitioner.is_chief)
        except Refusal as error:
            raise FailedSave(f"Step {step} is the best one, but {first_line(error)}", step) from error

    def restore(self, checkpoint: str | pathlib.Path, restarts_data: bool = False) -> dict[str, Any]:
        """Restores all variables and, unless the data are read from their beginning, the position in them.

        Returns:
            The description of the checkpoint, see `folders.describe`.

        Raises:
            BrokenCheckpoint, Refusal: see `tensors.restore`.
        """
        self.wait()
        return tensors.restore(checkpoint, self._variables, None if restarts_data else self._batches)

    def _check_finite(self, step):
        flags = self._partitioner.are_finite(list(self._variables.values()))
        for path, is_finite in zip(self._variables, flags, strict=True):
            if not is_finite:
                raise BrokenCheckpoint(f"{path} is not finite at step {step}, so this step is not saved; the last good "
                                       f"checkpoint is step {max(steps(self._folder), default=None)}.")

    def _tidy(self, step):
        self.last = step, time.time()
        self._remove_outdated()

    def _remove_outdated(self):
        if self._partitioner.is_chief:
            for old in outdated(self._folder, self._keep, self._keep_every):
                folders.remove(old)

    def _attempt(self, write: Callable[[], None]) -> BaseException | None:
        """Returns the error of a function that writes, so that all processes can fail together."""
        try:
            write()
        except (OSError, tf.errors.OpError, Refusal) as error:
            if self._partitioner.is_lost_process(error):
                raise
            return error
        return None

    def _agree(self, error, final=None):
        """Raises in all processes if one has an error, after the first one has removed the files of `final`."""
        if self._partitioner.any_process(error is not None):
            if final is not None and self._partitioner.is_chief:
                writing.discard(final)
            raise error or OSError("another process could not write its part and names the cause")

    @contextlib.contextmanager
    def _refusing(self, step) -> Iterator[None]:
        """Turns errors of files in this scope into a FailedSave that names the step, unless the run was taken."""
        try:
            yield
        except (OSError, tf.errors.OpError, Refusal) as error:
            if self._partitioner.is_lost_process(error):
                raise
            with contextlib.suppress(OSError):
                whole_file.check_owned(self._folder)  # raises the cause if another process took the run
            self._unsaved = step
            reason = first_line(error).rstrip(".")
            raise FailedSave(f"The checkpoint of step {step} could not be written to {self._folder} ({reason}); the "
                             "older ones are as they were.", step) from error
