"""Evaluates a run on the validation split between its steps, and keeps its best checkpoint."""

import math
from collections.abc import Callable

from switch_tf import data
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation import split_evaluator
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.reporting import summaries
from switch_tf.training.state import State


class Validation:
    """Evaluates a run, logs the results, and saves the checkpoint of each step that is better than all before it.

    Args:
        state: State.
        run: Run.
        settings: StepSettings.
        objective: Objective, built.
        partitioner: Partitioner.
        folder: RunFolder.
        writer: summaries.Writer or NoWriter.
        progress: summaries.Progress.
    """

    def __init__(self, state: State, run: Run, settings: StepSettings, objective: Objective, partitioner: Partitioner,
                 folder: RunFolder, writer: summaries.Writer | summaries.NoWriter, progress: summaries.Progress):
        self._state = state
        self._run = run
        self._settings = settings
        self._objective = objective.for_evaluation()
        self._partitioner = partitioner
        self._writer = writer
        self._progress = progress
        # Made for the first evaluation, because it reads examples.
        self._evaluator: split_evaluator.SplitEvaluator | None = None
        self.best = Best(run, folder)
        self.best.take_up(state.step, partitioner.is_chief)

    @property
    def compiles(self) -> bool:
        """Whether the next evaluation is the first one of this process."""
        return self._evaluator is None

    def run(self, keep: Callable[[dict[str, float]], None], advance: Callable[[int], None]) -> None:
        """Evaluates the current step.

        Args:
            keep: function called with the values if the step is the best so far, to keep its checkpoint.
            advance: function called with the number of examples of each batch. What it raises ends the evaluation.
        """
        state, run = self._state, self._run
        self._evaluator = self._evaluator or self._make_evaluator()
        results = self._evaluator.run(advance, has_records=False)
        values = split_evaluator.named({name: result.values for name, result in results.items()},
                                       split_evaluator.average(results))
        if state.step == 0 and run.unigram_batches:
            values |= self._unigram_values()
        declared = split_evaluator.declared_directions(results)
        self._writer.write(state.step, values, declared)
        self._progress.say(f"step {state.step}/{run.train_steps}  {summaries.shown(values)}")
        if not math.isfinite(values.get(run.best_metric, 0.0)):
            self._progress.say(f"{run.best_metric} is not finite at step {state.step}, so this evaluation is no better "
                               "than any other.")
        if self.best.is_improved(values, declared):
            keep(values)

    def _make_evaluator(self):
        run, task = self._run, self._run.mixture_or_task_name
        tasks = data.names_of_tasks(task, "validation") if run.eval_each_task else []
        if data.has_metrics(task, "validation"):
            self._progress.say("Tracing predictions, for the metrics of the task ...")
        evaluator = split_evaluator.SplitEvaluator(
            self._state.model, data.description_of_data(run, self._state.model.config, "validation", 0), self._settings,
            self._partitioner, self._objective, [task, *tasks], run.eval_batches, run.eval_batches * run.batch_size)
        for warning in evaluator.warnings:
            self._progress.say(warning)
        return evaluator

    def _unigram_values(self):
        run = self._run
        description = data.description_of_data(run, self._state.model.config, "train", run.seed + 1)
        losses = self._evaluator.unigram_losses(data.get_dataset(description).take(run.unigram_batches))
        return {f"eval/{name}/unigram_loss": loss for name, loss in losses.items()}
