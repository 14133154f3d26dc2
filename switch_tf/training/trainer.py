"""The training loop: decides when to log, evaluate, save and stop, never what a step computes."""

import contextlib
import re
import signal
import time

import keras

from switch_tf import accounting, data, metrics
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import checkpoint_folders, checkpoints, peak, report, summaries
from switch_tf.training.diagnosis import Divergence, first_bad_tensor
from switch_tf.training.evaluation import compile_evaluation, evaluate, unigram_loss
from switch_tf.training.run import StepSettings, check_division, check_periods
from switch_tf.training.run_folder import RunFolder
from switch_tf.training.train_step import compile_steps


class Trainer:
    """Trains a model, from wherever its run folder stands to the last step.

    Everything that can be wrong with the arguments is refused here, before anything is compiled or written.

    Args:
        model: SwitchTransformer, not built.
        optimizer: Keras optimizer.
        run: Run.
        step_settings: StepSettings.
        partitioner: Partitioner, by default of one device.
    """

    def __init__(self, model, optimizer, run, step_settings=None, partitioner=None):
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.step_settings = step_settings or StepSettings()
        self._stop_signal = None
        self.partitioner = partitioner or Partitioner()
        self._check()

    def _check(self):
        run, config, settings = self.run, self.model.config, self.step_settings
        data.check_task(run.mixture_or_task_name)
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size)
        check_periods(run, settings)
        self.partitioner.check(config.num_parameters, settings.steps_per_call, settings.use_xla)
        check_division(config, self.partitioner.layout, run.batch_size, run.task_feature_lengths,
                       settings.num_microbatches)
        if run.initial_checkpoint is not None:
            checkpoint_folders.describe(checkpoint_folders.resolve(run.initial_checkpoint))

    def prepare(self, operative_config: str = "") -> None:
        """Takes the run folder, builds model, optimizer and input, and restores the newest checkpoint, if any.

        Args:
            operative_config: text that is kept in the run folder, the resolved configuration.
        """
        run, partitioner = self.run, self.partitioner
        self.folder = RunFolder(run.model_dir, is_owner=partitioner.is_chief)
        partitioner.barrier()  # the others look into the folder only when it has been tidied up
        self.progress = summaries.Progress(0, run.train_steps, is_shown=partitioner.is_chief)
        keras.utils.set_random_seed(run.seed)
        partitioner.build(self.model, self.optimizer)
        self.progress.say(f"{self.model.config.num_parameters:,} parameters, "
                          f"{sum(variable.value.shape.num_elements() for variable in self.optimizer.variables):,} "
                          f"numbers of optimizer state; reading {run.mixture_or_task_name}")
        self._iterator = iter(self._dataset("train", run.seed).batch(self.step_settings.steps_per_call))
        self._variables = checkpoints.state_variables(self.model, self.optimizer)
        self.step, pending = self._restore()
        if partitioner.is_chief:
            # Only now is it certain that this configuration belongs to what the folder holds.
            if operative_config:
                (self.folder.path / "operative_config.gin").write_text(operative_config)
            self.folder.cut_metrics(self.step if self.step else -1)
        self.progress.advance(self.step)
        self._peak_flops = peak.measured_peak_flops(self.model.compute_dtype) * partitioner.num_processors
        lengths = run.task_feature_lengths
        flops = accounting.flops_per_step(self.model.config, run.batch_size, lengths["inputs"], lengths["targets"])
        self._meter = summaries.Meter(flops, self._peak_flops, pending)
        self._step_function = compile_steps(self.model, self.optimizer, run.seed, self.step_settings, partitioner)
        if run.eval_period:
            self._eval_step = compile_evaluation(self.model, self.step_settings, partitioner)
            self._eval_batches = self._dataset("validation", 0).take(run.eval_batches).cache()

    def _dataset(self, split, seed):
        run = self.run
        return data.get_dataset(data.DatasetDescription(
            run.mixture_or_task_name, run.task_feature_lengths, run.batch_size, split, seed, run.pack,
            self.model.config.is_encoder_only))

    def _restore(self):
        """Returns the step to go on from and the metrics that were summed since the last logged one."""
        broken = []
        for step in reversed(checkpoints.steps(self.folder.checkpoints)):
            path = checkpoints.path_of(self.folder.checkpoints, step)
            try:
                description = checkpoints.restore(path, self._variables, self._iterator)
            except checkpoints.BrokenCheckpoint as error:
                self.progress.say(f"{error} Trying the one before it.")
                broken.append(path)
                continue
            for newer in broken:
                self.progress.say(f"{newer} is kept as {checkpoint_folders.set_aside(newer)}.")
            self.progress.say(f"Going on from step {step} ({path}).")
            return step, summaries.pending_from_json(description["pending_metrics"])
        if broken:
            raise ValueError(f"No checkpoint in {str(self.folder.checkpoints)!r} can be read; move the folder away to "
                             "start anew, or restore it from a copy.")
        if self.run.initial_checkpoint is not None:
            path = checkpoint_folders.resolve(self.run.initial_checkpoint)
            checkpoints.restore(path, checkpoints.state_variables(self.model))
            self.progress.say(f"Starting from the weights of {path}.")
        return 0, {}

    def train(self) -> dict:
        """Runs to the last step, or until interrupted; returns what `report.summarize` says of the run.

        Raises:
            Divergence: a loss or gradient is not finite; the last good checkpoint stays.
        """
        self._writer = summaries.Writer(self.folder) if self.partitioner.is_chief else summaries.NoWriter()
        try:
            with self._stops_on_signals():
                if self.step == 0:
                    self._evaluate()
                if self.step < self.run.train_steps:
                    self._compile()
                while self.step < self.run.train_steps and not self._is_stopped():
                    self._take_steps()
            self._save()
            if self._stop_signal:
                self.progress.say(f"Stopped by {self._stop_signal} at step {self.step}. Everything up to it is saved "
                                  f"in {self.folder.path}; the same command goes on from there.")
        finally:
            self._writer.close()
            self.progress.close()
            if self.partitioner.is_chief:
                report.write(self.folder.path)
            self.folder.close()
        return {"interrupted": bool(self._stop_signal), **report.summarize(self.folder.path)}

    def _is_stopped(self):
        """Whether some process was told to stop; all of them leave the loop at the same step."""
        if self.partitioner.any_process(bool(self._stop_signal)):
            self._stop_signal = self._stop_signal or "a signal to another process"
        return bool(self._stop_signal)

    def lost_process(self, reason: str) -> str:
        """What to say when another process of the run cannot be reached any more."""
        saved = checkpoints.steps(self.folder.checkpoints)
        found = re.search(r"(Collective ops is aborted by: [^\n]*|Task \S+ heartbeat timeout|Connection [^\n]*|"
                          r"failed to connect[^\n]*)", reason)
        reason = found[1] if found else reason.strip().partition("\n")[0]
        return (f"Another of the {self.partitioner.num_processes} processes is gone ({reason}), so process "
                f"{self.partitioner.process_index} ends at step {self.step}. The last good checkpoint is "
                f"{checkpoints.path_of(self.folder.checkpoints, saved[-1]) if saved else 'none'}; start all processes "
                "again with the same command to go on from it.")

    def _compile(self):
        started = time.perf_counter()
        self.progress.say("Tracing the training step ...")
        self.partitioner.trace(self._step_function, self._iterator.element_spec)
        self.progress.say(f"... {time.perf_counter() - started:.0f} s. The first step also optimises the graph.")
        self._meter.restart()

    def _take_steps(self):
        run, settings = self.run, self.step_settings
        asked = time.perf_counter()
        batches = next(self._iterator)
        input_wait = time.perf_counter() - asked
        means, bad_step = self._step_function(self.partitioner.place(batches))
        bad_step = int(bad_step)
        if bad_step >= 0:
            self._diverged(batches, bad_step)
        self._meter.add(metrics.to_host(means), settings.steps_per_call, input_wait)
        self.step += settings.steps_per_call
        self.progress.advance(settings.steps_per_call)
        if self.step % run.log_period == 0:
            values = self._meter.read(self.model.config)
            self._writer.write(self.step, values)
            self.progress.log(self.step, values)
        paused_at = self._meter.pause()
        if run.eval_period and (self.step % run.eval_period == 0 or self.step == run.train_steps):
            self._evaluate()
        if self.step % run.checkpoint_period == 0:
            self._save()
        self._meter.resume(paused_at)

    def _evaluate(self):
        run = self.run
        if not run.eval_period:
            return
        means = evaluate(self._eval_step, self._eval_batches)
        prefix = f"eval/{run.mixture_or_task_name}"
        parts = summaries.loss_parts(self.model.config, means, prefix)
        # Held-out loss is the cross-entropy alone: the other parts steer training and say nothing of quality.
        values = {f"{prefix}/loss": parts[f"{prefix}/cross_entropy"], f"{prefix}/accuracy": parts[f"{prefix}/accuracy"]}
        if self.step == 0 and run.unigram_batches:
            counted = self._dataset("train", run.seed + 1).take(run.unigram_batches)
            values[f"{prefix}/unigram_loss"] = unigram_loss(self.model.config, counted, self._eval_batches)
        self._writer.write(self.step, values)
        self.progress.say(f"step {self.step}/{run.train_steps}  " + "  ".join(
            f"{name} {value:.4f}" for name, value in values.items()))

    def _save(self):
        checkpoints.save(self.folder.checkpoints, self.step, self._variables, self._iterator,
                         summaries.pending_to_json(self._meter.sums), self.run.keep_checkpoints, self.partitioner)

    def _diverged(self, batches, bad_step):
        step = self.step + bad_step
        features = {name: value[bad_step] for name, value in batches.items()}
        where = first_bad_tensor(self.model, features, self.run.seed, step, self.step_settings, self.partitioner)
        saved = checkpoints.steps(self.folder.checkpoints)
        raise Divergence(
            f"The loss or a gradient of step {step + 1} is not finite; the first bad tensor is {where}. Nothing was "
            f"updated by that step, and the last good checkpoint is "
            f"{checkpoints.path_of(self.folder.checkpoints, saved[-1]) if saved else 'none'}. A lower learning rate, "
            "clip_norm or router_dtype='float32' usually help.")

    @contextlib.contextmanager
    def _stops_on_signals(self):
        """Within this scope Ctrl-C and SIGTERM end the run after the step at hand; a second one ends it at once."""

        def stop(number, frame):
            if self._stop_signal:
                raise KeyboardInterrupt
            self._stop_signal = signal.Signals(number).name
            self.progress.say(f"{self._stop_signal}: saving after this step; once more stops without saving.")

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
