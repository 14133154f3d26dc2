"""The training loop, with logging, evaluation and checkpoints."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import data, metrics
from switch_tf.checkpoints import folders
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.checkpointer import Checkpointer, FailedSave
from switch_tf.checkpoints.run_folder import LEFT_OUT, RunFolder
from switch_tf.configs import accounting
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation import split_evaluator
from switch_tf.evaluation.objectives import Objective
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner, select_step
from switch_tf.refusals import Outage, Refusal, first_line, sentence_about_data
from switch_tf.reporting import report, summaries
from switch_tf.storage import places
from switch_tf.training import stopping
from switch_tf.training.speed import Clock, Meter, Peak, Profiling
from switch_tf.training.train_step import Divergence, StepResults, compile_steps, first_bad_tensor


@dataclasses.dataclass
class State:
    """Everything that a run needs to continue. The model and the optimizer are built.

    Args:
        sums: StepMeasurements on the host, summed since the last logged step.
        learning_rate: Of the next step, once a step was taken.
    """

    model: SwitchTransformer
    optimizer: keras.optimizers.Optimizer
    batches: data.Batches
    checkpointer: Checkpointer
    step: int = 0
    sums: metrics.StepMeasurements | None = None
    learning_rate: float | None = None


class _Call(NamedTuple):
    """A call of the step that may not have ended."""

    results: Callable[[], StepResults]  # waits for it
    batches: dict  # for a diagnosis
    is_timed: bool  # whether it counts for the speed


class _Stopped(Exception):
    """A reason to stop came during an evaluation."""


class Training:
    """A run in progress, made by `Trainer.start`. Call `advance` any number of times, then `finish`.

    Where a call of the step returns before it ends, the next one starts before the results of the last are fetched and
    logged, unless the state is saved or evaluated between them. `state.step` counts steps with fetched results.

    Only `last_save`, `request_save` and `rescue` are for other threads. As a context manager it closes the run.
    """

    def __init__(self, state: State, run: Run, settings: StepSettings, objective: Objective, partitioner: Partitioner,
                 folder: RunFolder, progress: summaries.Progress, clock: Clock):
        self.state = state
        self.run = run
        self.settings = settings
        self.objective = objective
        self.partitioner = partitioner
        self.folder = folder
        self.progress, self._say = progress, progress.say
        config = state.model.config
        lengths = run.task_feature_lengths
        self._clock = clock
        self._meter = Meter(accounting.flops_per_step(config, run.batch_size, lengths["inputs"], lengths["targets"]),
                            Peak(state.model.compute_dtype, partitioner.num_processors), clock)
        self._step = compile_steps(state.model, state.optimizer, run.seed, settings, partitioner, objective)
        self._profiling = Profiling(run.profile_steps // settings.steps_per_call if partitioner.is_chief else 0,
                                    folder.path, partitioner, progress.say)
        self._writer = summaries.Writer(folder) if partitioner.is_chief else summaries.NoWriter()
        # Created at the first evaluation, because it reads examples.
        self._evaluator: split_evaluator.SplitEvaluator | None = None
        self._best = Best(run, folder)
        self._best.take_up(state.step, partitioner.is_chief)
        self._changing = threading.RLock()  # held while the state changes or is saved
        self._first_step = state.step
        self._call: _Call | None = None  # under way
        self._requests = stopping.Requests(run, partitioner)
        self.request_save = self._requests.request_save
        self._is_begun = self._has_stepped = False
        self._patience_reason = None
        self._is_finished = False
        self._is_open = True
        clock.enter(None)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Refusal):
            stopping.classify(error)
        if error is not None and self.partitioner.is_lost_process(error):
            self.state.checkpointer.abandon()
        self.close(first_line(error) if error else "")
        if isinstance(error, places.BucketError):
            raise Outage(f"{error.filename} cannot be reached ({first_line(error.strerror)}). {self.last_save()} The "
                         "same command goes on from there.") from error

    def advance(self, step: int, stop_reason: Callable[[], str | None] = lambda: None, num_untimed_steps: int = 0,
                look_at: Callable[[int, dict], None] = lambda step, batches: None) -> None:
        """Trains until `step`. Checkpoints on the way are complete when it returns.

        Args:
            step: At most the run's last one.
            stop_reason: Called after every call of the step and every batch of an evaluation. Returns a reason to stop,
                or None. All processes stop together. The next start repeats an interrupted evaluation once, or always
                at the last step or for a `best_metric`.
            num_untimed_steps: First steps to leave out of the speed: runs that train in turns start with cold caches.
            look_at: Called before each call of the step with the steps taken and the batches, <int32>[steps_per_call,
                batch, length] by name.

        Raises:
            Divergence: A loss or gradient is not finite.
            Refusal: A checkpoint could not be written, unless `on_failed_save` lets the run go on.
        """
        self._requests.listen(stop_reason)
        with self._clock.counting("steps" if self._has_stepped else "start/first_step"):
            self._begin()
            timed_from = self.state.step + num_untimed_steps
            while self._called_step < step and not (self._is_out_of_patience() or self._requests.stops(in_step=True)):
                with self._changing:
                    if not self._call_step(self._called_step >= timed_from, look_at):
                        continue
                    is_save_due = self._requests.takes_save() or self._is_due(self.run.checkpoint_period)
                    is_evaluation_due = self._is_due(self.run.eval_period)
                    if is_save_due or is_evaluation_due or self._called_step >= step:
                        self._end_call()
                    # Before an evaluation, because little time is left after a signal.
                    if is_save_due:
                        self._save()
                if is_evaluation_due:
                    self._evaluate()
            with self._changing:
                self._end_call()
                try:
                    with self._clock.counting("save"):
                        self.state.checkpointer.wait()  # or it would slow the next turn of another run
                except FailedSave as failure:
                    self._go_on_after(failure)

    def last_save(self) -> str:
        """Returns a sentence on the last checkpoint."""
        if self.state.checkpointer.last is None:
            return f"Nothing was saved since the start at step {self._first_step}."
        step, saved_at = self.state.checkpointer.last
        return f"The last save is of step {step}, at {time.strftime('%H:%M:%S', time.localtime(saved_at))}."

    def rescue(self, reason: str) -> str | None:
        """Saves a run while its own thread is busy without changing the state, as in a compilation.

        The process must end afterwards. Not for several processes, because each compiles for itself.

        Returns:
            A sentence about the save, or None if the run's own thread will save.
        """
        if self.partitioner.num_processes > 1 or not self._changing.acquire(blocking=False):
            return None
        try:
            if self.state.step > self._first_step:
                self.save()
                self.state.checkpointer.wait()
            if not self._is_finished:
                self._requests.stopped_by = reason
                self._write_end("")
        except BaseException:
            self._changing.release()
            raise
        return (f"Stopped by {reason} at step {self.state.step}, in an evaluation or compilation that did not end "
                f"in time. Everything up to it is saved in {self.folder.path}; the same command goes on from there.")

    def save(self) -> None:
        """Logs the current step and starts to save it."""
        with self._changing:
            if self._is_finished:
                return
            self._end_call()
            if self.state.sums is not None and self._meter.has_steps:
                self._log()
            self._save(is_last=True)

    def finish(self) -> dict:
        """Logs and saves the current step. Returns `report.summarize` of the run, and whether it was interrupted."""
        with self._changing:
            self.save()
            with self._clock.counting("save"):
                self.state.checkpointer.wait()
            self._write({})
            self._writer.flush()
            self._is_finished = True
            if stopped_by := self._requests.stopped_by:
                self._say(f"Stopped by {stopped_by} at step {self.state.step}. Everything up to it is "
                          f"saved in {self.folder.path}; the same command goes on from there.")
            self.close()
        records = self._try_last(lambda: report.read_metrics(self.folder.path))
        summary = report.summarize(self.folder.path, records or [])
        if best := self._best.current:
            self._say(f"Best: {best['metric']} {best['value']:.4f} at step {best['step']}, kept in "
                      f"{folders.path_of(self.folder.checkpoints, best['step'])}.")
        return {"interrupted": bool(stopped_by), **summary, "step": self.state.step}

    def close(self, error: str = "") -> None:
        """Records why the run ended, writes the report and releases the run folder.

        Args:
            error: First line of the error that ended the run before `finish`.

        Raises:
            Refusal: A pending checkpoint failed, and `error` is empty.
        """
        if not self._is_open:
            return
        self._is_open = False
        self.state.batches.close()
        unsaved = None
        try:
            self.state.checkpointer.close()
        except Refusal as failure:
            unsaved = failure
            self._say(str(unsaved))

        def write_report():
            if self._owns_folder():
                self._say("Writing the report ...")
                report.write(self.folder.path)

        for last_action in (self._profiling.close, self._writer.close,
                            lambda: self._write_end(error or str(unsaved or "")), write_report, self.folder.close):
            self._try_last(last_action)
        self.progress.close()
        if unsaved is not None and not error:
            raise unsaved

    def _try_last(self, action):
        """Prints a failure and returns None, because the checkpoints are saved."""
        try:
            return action()
        except (OSError, Refusal) as failure:
            self._say(f"{str(failure).rstrip('.')}. What is saved stays, and the same command writes the rest.")
            return None

    def _write_end(self, error):
        """Records why the run ended, for `eval --follow`."""
        if not self._owns_folder():
            return
        if error:  # may have followed a signal, during the save
            reason = error
        elif self._requests.stopped_by:
            reason = f"stopped by {self._requests.stopped_by}"
        elif self._is_finished:
            reason = self._patience_reason or (f"TRAIN_STEPS is {self.run.train_steps}" if (
                self.state.step >= self.run.train_steps) else "its program finished it")
        else:
            reason = "its program closed it"
        self.folder.write_end(self.state.step, reason)

    def _owns_folder(self):
        if not self.partitioner.is_chief:
            return False
        try:
            self.folder.check_is_there()
        except Refusal:
            return False
        return True

    def _begin(self):
        """Once: evaluates if that is due or was interrupted, and traces the step."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._is_due(self.run.eval_period) and self.partitioner.any_process(
                not self.folder.has_evaluation(self.state.step)):
            self._evaluate()
        if self._requests.stops():
            self._is_begun = False
        elif self.state.step < self.run.train_steps:
            self.state.batches.read_ahead()
            later = " The first step also optimises the graph." if not self.partitioner.has_fixed_shapes else ""
            self._say("Tracing the training step ..." if later else "Compiling the training step ...")
            with self._clock.counting("compile"):
                self._step.trace(self.state.batches.element_spec, 1 + self._requests.agrees_on_saves)
            self._say(f"... {self._clock.read()['compile']:.0f} s.{later}")

    @property
    def _called_step(self):
        """The step after those under way."""
        return self.state.step + self.settings.steps_per_call * (self._call is not None)

    def _is_due(self, period):
        """Whether something is due every `period` steps after those under way."""
        return bool(period) and (self._called_step % period == 0 or self._called_step == self.run.train_steps)

    def _is_out_of_patience(self):
        """All processes agree."""
        if reason := self._best.reason_to_stop(self.state.step):
            self._say(f"Ended at step {self.state.step} by {reason}.")
        self._patience_reason = reason
        return reason is not None

    def _call_step(self, is_timed, look_at):
        """Calls the step, then ends the call before. Returns False if a signal came and no batch did."""
        state, step = self.state, self._called_step
        try:
            with self._clock.counting("input"):
                batches = state.batches.wait(self._requests.impatience(step, self._say))
        except tf.errors.OpError as error:
            self._end_call()
            description = data.description_of_data(self.run, state.model.config, "train", self.run.seed)
            reason = (sentence_about_data(error) or data.bad_row(description, error) or first_line(error)).rstrip(".")
            raise Refusal(f"The batch after step {step} cannot be read ({reason}); the last good checkpoint is "
                          f"{self._settled_checkpoint()}.") from error
        if batches is None:
            self._say(f"The batch after step {step} did not come within {stopping.GRACE} s after the signal, so "
                      "the run ends without it.")
            return False
        look_at(step, state.batches.drop_added(batches))
        is_recorded = self._profiling.is_recording
        with self._profiling.step(step):
            results = self._step.start(self.partitioner.place(batches), self._requests.flags())
            earlier, self._call = self._call, _Call(results, batches, is_timed and not is_recorded)
            self._take_results(earlier)
            if is_recorded or not self.partitioner.is_asynchronous:
                self._end_call()
        return True

    def _end_call(self):
        """Waits for the call under way."""
        call, self._call = self._call, None
        self._take_results(call)

    def _take_results(self, call):
        """Waits for a call, if any, then counts and logs its steps."""
        if call is None:
            return
        state, num_steps = self.state, self.settings.steps_per_call
        measured, bad_step, rate, flags = call.results()
        if bad_step >= 0:
            self._call = None  # the next one made no update
            step = state.step + bad_step
            tensor = first_bad_tensor(state.model, select_step(call.batches, bad_step), self.run.seed, step,
                                      self.settings, self.partitioner, self.objective)
            raise Divergence(
                f"The loss or a gradient of step {step + 1} is not finite; the first bad tensor is {tensor}. Nothing "
                f"was updated by that step, and the last good checkpoint is {self._settled_checkpoint()}. A lower "
                "learning rate, clip_norm or router_dtype='float32' usually help.")
        self._requests.agree(*flags)
        state.sums, state.learning_rate = metrics.merge(state.sums, measured), rate
        state.step += num_steps
        self._meter.add(num_steps, float(measured.tokens.total), call.is_timed)
        if not self._has_stepped:
            self._write_start()
        self.progress.advance(num_steps)
        if state.step % self.run.log_period == 0 or state.step == self.run.train_steps:
            self._log()
        else:
            self.progress.glance(state.step, float(measured.loss.total) / float(measured.loss.weight))

    def _write_start(self):
        """Reports the time to the first step, by cause."""
        self._has_stepped = True
        seconds = self._clock.take("steps")
        self._writer.write(self._first_step, seconds)
        parts = ", ".join(f"{name.rpartition('/')[2]} {value:.1f}" for name, value in seconds.items())
        self._say(f"First step after {sum(seconds.values()):.1f} s: {parts}.")

    def _write(self, values, *declared):
        """Writes a line, after the first step with the seconds since the last one."""
        if line := values | (self._clock.take() if self._has_stepped else {}):
            self._writer.write(self.state.step, line, *declared)

    def _log(self):
        """Writes means since the last multiple of LOG_PERIOD."""
        state, speeds = self.state, self._meter.read()
        # While a call is under way, this takes no time from the steps.
        with self._clock.counting("steps" if self._call else "log"):
            self.folder.check_is_there()
            values = summaries.training_values(state.sums, {**speeds, "learning_rate": state.learning_rate})
            self._write(values)
            self.progress.log(state.step, values)
        if state.step % self.run.log_period == 0:
            state.sums = None

    def _evaluate(self):
        def go_on(num_examples):
            if self._requests.stops():
                raise _Stopped

        self.folder.check_is_there()
        try:
            with self._clock.counting("evaluate"):
                go_on(0)
                if (self._evaluator is None and self.partitioner.num_processes > 1
                        and self.state.step > self._first_step):
                    self._save()  # because a single process cannot leave a compilation
                self._validate(go_on)
        except _Stopped:
            if (self.run.best_metric or self.state.step == self.run.train_steps
                    or self.state.step > self._first_step):
                self._say(f"The evaluation of step {self.state.step} is made at the next start.")
            else:  # stopped twice: on an often preempted machine, training would never advance
                self._say(f"The evaluation of step {self.state.step} is left out.")
                self._write({LEFT_OUT: 1})
        except FailedSave as failure:
            self._go_on_after(failure)
        except tf.errors.OpError as error:
            if self.partitioner.is_lost_process(error) or not stopping.is_outage(error, is_running=False):
                raise
            raise Outage(f"The evaluation of step {self.state.step} failed ({first_line(error).rstrip('.')}); the same "
                         f"command goes on from {self._last_checkpoint()}.") from error

    def _validate(self, go_on):
        run, step = self.run, self.state.step
        self._evaluator = self._evaluator or self._make_evaluator()
        results = self._evaluator.run(go_on, has_records=False)
        values = split_evaluator.named({name: result.values for name, result in results.items()},
                                       split_evaluator.average(results))
        if step == 0 and run.unigram_batches:
            description = data.description_of_data(run, self.state.model.config, "train", run.seed + 1)
            losses = split_evaluator.unigram_losses(
                self.state.model.config, self._evaluator.description,
                data.get_dataset(description).take(run.unigram_batches), self._evaluator.batches)
            values |= {f"eval/{name}/unigram_loss": loss for name, loss in losses.items()}
        declared = split_evaluator.declared_directions(results)
        self._write(values, declared)
        self._say(f"step {step}/{run.train_steps}  {summaries.shown(values)}")
        if not np.isfinite(values.get(run.best_metric, 0.0)):
            self._say(f"{run.best_metric} is not finite at step {step}, so this evaluation is no better than any "
                      "other.")
        if self._best.is_improved(values, declared):
            with self._changing:
                self._save()
                self.state.checkpointer.keep_best(self._best, step, values)

    def _make_evaluator(self):
        run, task, config = self.run, self.run.mixture_or_task_name, self.state.model.config
        tasks = data.names_of_tasks(task, "validation") if run.eval_each_task else []
        if data.has_metrics(task, "validation"):
            self._say("Tracing predictions, for the metrics of the task ...")
        evaluator = split_evaluator.SplitEvaluator(
            self.state.model, data.description_of_data(run, config, "validation", 0), self.settings, self.partitioner,
            self.objective.for_evaluation(), [task, *tasks], run.eval_batches, run.eval_batches * run.batch_size)
        for warning in evaluator.warnings:
            self._say(warning)
        return evaluator

    def _save(self, is_last=False):
        state = self.state
        self.folder.check_is_there()
        if state.sums is not None:
            self._write({})  # or steps before the checkpoint would count as redone
        try:
            with self._clock.counting("save"):
                state.checkpointer.save(state.step, state.sums and metrics.to_json(state.sums), self._writer.flush)
        except FailedSave as failure:
            is_earlier = failure.step < state.step  # this save waited for it and has not begun
            if is_last and not is_earlier:
                raise
            self._go_on_after(failure)
            if is_earlier:
                self._save(is_last)

    def _go_on_after(self, failure):
        if self.run.on_failed_save == "stop":
            raise failure
        self._say(f"{failure.sentence} Training goes on, since Run.on_failed_save is 'continue'.")

    def lost_process(self, cause: str) -> str:
        """Returns the message for a run that has lost another process. `cause` is half a sentence."""
        return (f"{cause}, so process {self.partitioner.process_index} ends at step {self.state.step}. The last good "
                f"checkpoint is {self._last_checkpoint()}; start all processes again with the same command to go on "
                "from it.")

    def _settled_checkpoint(self):
        self.state.checkpointer.settle()
        return self._last_checkpoint()

    def _last_checkpoint(self):
        saved = folders.steps(self.folder.checkpoints)
        return folders.path_of(self.folder.checkpoints, saved[-1]) if saved else "none"
