"""Checks the description of a run, and starts the run from its newest checkpoint."""

import dataclasses
from typing import Any

import keras

from switch_tf import data
from switch_tf.checkpoints import best, continuation
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.decoding import check_decodes
from switch_tf.evaluation.objectives import Objective
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries
from switch_tf.training import processes
from switch_tf.training.loop import Training
from switch_tf.training.state import check_start, keep_config, prepare
from switch_tf.training.train_step import check_division, check_trainable

_KINDS = {"model": SwitchTransformer, "optimizer": keras.optimizers.Optimizer, "run": Run,
          "step_settings": StepSettings, "objective": Objective}


def check_parts(**parts: Any) -> None:
    """Raises Refusal unless each part has the type of the `Trainer` argument with its name."""
    for name, part in parts.items():
        if not isinstance(part, _KINDS[name]):
            kind = _KINDS[name].__name__
            raise Refusal(f"Trainer.{name} must be {'an' if kind[0] in 'AEIO' else 'a'} {kind}, not {part!r}.")


class Trainer:
    """Trains a model from the newest checkpoint of its run folder to the last step.

    The constructor refuses arguments that cannot work, before anything is compiled or written. `configuration` is the
    `continuation.record` that checkpoints keep.

    Args:
        model: SwitchTransformer, not built.
        optimizer: Keras optimizer.
        run: Run.
        step_settings: StepSettings.
        partitioner: Partitioner. Defaults to one device.
        initial_weights: `conversion.initial_weights.Opened` of the run's `initial_checkpoint`, to start from instead.
        activation_dtype: str or None. The ACTIVATION_DTYPE that the model's policy was derived from, recorded in the
            run.
        objective: Objective. Defaults to `Objective()`, the cross-entropy of the targets.
    """

    def __init__(self, model: SwitchTransformer, optimizer: keras.optimizers.Optimizer, run: Run,
                 step_settings: StepSettings | None = None, partitioner: Partitioner | None = None,
                 initial_weights: Any = None, activation_dtype: str | None = None,
                 objective: Objective | None = None):
        step_settings, objective = step_settings or StepSettings(), objective or Objective()
        check_parts(model=model, optimizer=optimizer, run=run, step_settings=step_settings, objective=objective)
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.step_settings = step_settings
        self.partitioner = partitioner or Partitioner()
        self.objective = objective
        self._initial = initial_weights or run.initial_checkpoint
        self._activation_dtype = activation_dtype
        self._check()

    def _check(self):
        run, config, settings, optimizer = self.run, self.model.config, self.step_settings, self.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
            raise Refusal("The trainer scales no loss, so its optimizer must have no loss_scale_factor, as this "
                          f"{type(optimizer).__name__} has; leave it out, and compute in bfloat16, which needs none.")
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        check_periods(run, settings)
        if run.eval_period and run.best_metric:
            task = run.mixture_or_task_name
            best.check(run.best_metric, [task, *data.names_of_tasks(task, "validation")],
                       data.declares_directions(task, "validation"))
        check_trainable(settings.trainable, config)
        self.partitioner.check(config, settings.steps_per_call, settings.use_xla)
        check_division(config, self.partitioner.layout, run.batch_size, run.task_feature_lengths,
                       settings.num_microbatches)
        self.configuration = self._record()
        self.objective.check(config, self.configuration)
        check_start(run, self.configuration, self._initial)
        data.check_examples(data.description_of_data(run, config, "train", run.seed))
        if run.eval_period:
            data.check_examples(data.description_of_data(run, config, "validation", 0))
            if data.has_metrics(run.mixture_or_task_name, "validation"):
                data.check_metrics(run.mixture_or_task_name, "validation")
                check_decodes(config)
        if run.shown_examples:
            held_out = data.description_of_data(run, config, "validation", 0)
            data.check_examples(held_out)
            data.examples(held_out, 1)  # the texts, which are not in a cache
            check_decodes(config)

    def _record(self):
        """Returns the configuration that checkpoints keep."""
        run, config = self.run, self.model.config
        held_out = data.fingerprint(data.description_of_data(run, config, "validation", 0)) if run.eval_period else {}
        return continuation.record(
            config, run, self.step_settings, self.model.dtype_policy.name, self.optimizer, self.objective,
            data.fingerprint(data.description_of_data(run, config, "train", run.seed)), held_out,
            data.vocabulary_fingerprint(run.mixture_or_task_name, run.vocabulary),
            data.pieces_fingerprint(run.mixture_or_task_name, run.vocabulary))

    def start(self, operative_config: str = "", progress: summaries.Progress | None = None) -> Training:
        """Locks the run folder and prepares the next step. May be called once.

        Args:
            operative_config: str, the resolved configuration, written into the run folder.
            progress: summaries.Progress. Defaults to a new progress bar.

        Raises:
            Refusal: another process has locked the folder, its checkpoints belong to another configuration, or another
                process of the run has one.
        """
        run, partitioner = self.run, self.partitioner
        lines = [line for line in operative_config.splitlines() if not line.startswith("#")]
        processes.agree(partitioner, {**self.configuration, "layout": dataclasses.asdict(partitioner.layout),
                                      "MODEL_DIR": str(run.model_dir), "the gin configuration": lines})
        folder = RunFolder(run.model_dir, is_owner=partitioner.is_chief)
        partitioner.barrier()  # other processes read the folder only after it has been tidied up
        progress = progress or summaries.Progress(0, run.train_steps, is_shown=partitioner.is_chief)
        try:
            state = prepare(self.model, self.optimizer, self.objective, run, self.step_settings, partitioner, folder,
                            self.configuration, progress.say, self._initial)
            if partitioner.is_chief:
                # Only now is it certain that this configuration belongs to the contents of the folder.
                if operative_config:
                    folder.write_configuration(operative_config)
                folder.remove_end()
                keep_config(folder.path, self.model, run, self._activation_dtype, progress.say)
                folder.cut_metrics(state.step if state.step else -1,
                                   ends_between=state.sums is not None and state.step < run.train_steps)
            progress.resume(state.step)
            return Training(state, run, self.step_settings, self.objective, partitioner, folder, progress)
        except BaseException:
            progress.close()
            folder.discard()
            raise

    def train(self, operative_config: str = "") -> dict:
        """Trains to the last step. Returns the result of `Training.finish`."""
        with self.start(operative_config) as training:
            training.advance(self.run.train_steps)
            return training.finish()
