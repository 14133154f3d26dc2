"""Evaluates a model on one split of a task or mixture; training and `switch-tf eval` both use it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import keras

from switch_tf import data
from switch_tf.configs import directions
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation import held_out_loss
from switch_tf.evaluation.objectives import Objective
from switch_tf.evaluation.task_metrics import TaskMetrics
from switch_tf.metrics import Measurements
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal


class TaskResult(NamedTuple):
    """Evaluation results of one task or mixture.

    `measured`: Measurements of its batches, on the host; None where no loss was computed.
    `scores`: data.TaskScores of its metrics; None for a mixture and for a task without metrics.
    """

    measured: Measurements | None = None
    scores: data.TaskScores | None = None

    @property
    def values(self) -> dict[str, float]:
        """Each value by its name: "loss" and "accuracy" over target tokens, and the task's metrics.

        The loss is the cross-entropy alone, because the other terms steer training and do not measure quality. Where a
        task has metrics, the accuracy over tokens is called "token_accuracy": a metric may be called accuracy.
        """
        values = {}
        if self.measured is not None:
            values["loss"] = _divide(self.measured.loss_terms["cross_entropy"])
            values["accuracy" if self.scores is None else "token_accuracy"] = _divide(self.measured.accuracy)
        return values if self.scores is None else values | self.scores.metrics


def _divide(mean):
    return float(mean.total / (mean.weight or 1.0))


class SplitEvaluator:
    """Evaluates a model on one split, as often as its weights change.

    Tasks with metrics are scored on predictions, see `TaskMetrics`. A loss is computed with the configuration's
    evaluation capacity factor, so tokens may be dropped. Two attributes describe the split: `num_examples`, of each
    task with metrics, and `warnings`, a sentence for each task with targets that no prediction can match.

    Args:
        model: SwitchTransformer, built.
        description: data.DatasetDescription of the split.
        settings: StepSettings.
        partitioner: Partitioner.
        objective: Objective, built.
        losses_of: names of the tasks and mixtures to compute a loss for. Defaults to the tasks without metrics.
        num_batches: int or None. Computes each loss on this number of batches, which stay in memory. None reads the
            whole split each time.
        num_examples: int or None. Largest number of examples of each task with metrics.

    Raises:
        Refusal: the task has no such split, or the model cannot predict.
    """

    def __init__(self, model: keras.Model, description: data.DatasetDescription, settings: StepSettings,
                 partitioner: Partitioner, objective: Objective, losses_of: Iterable[str] | None = None,
                 num_batches: int | None = None, num_examples: int | None = None):
        name, split = description.mixture_or_task_name, description.split
        tasks = data.names_of_tasks(name, split)
        self._names = list(dict.fromkeys([name, *tasks]))
        self._config = model.config
        self._split, self._description = split, description
        self._batch_size = description.batch_size
        self._metrics = None
        if data.has_metrics(name, split):
            self._metrics = TaskMetrics(model, description, partitioner, num_examples)
        self.num_examples = self._metrics.num_examples if self._metrics else {}
        self.warnings = self._metrics.warnings if self._metrics else []
        if losses_of is None:
            losses_of = [task for task in tasks if task not in self.num_examples]
        self._batches = {task: _batches(description, task, num_batches) for task in losses_of}
        self._step = held_out_loss.compile_evaluation(model, settings, partitioner, objective)

    @property
    def total_examples(self) -> int | None:
        """Number of examples of all tasks, or None if a loss is computed on an unknown number of them."""
        return None if self._batches else sum(self.num_examples.values())

    def run(self, advance: Callable[[int], None] = lambda count: None,
            has_records: bool = True) -> dict[str, TaskResult]:
        """Evaluates the model with its current weights.

        Args:
            advance: function called with the number of examples evaluated since its last call.
            has_records: bool. Whether the scores hold the predictions as text.

        Returns:
            Name of each task or mixture -> TaskResult, a mixture before its tasks.

        Raises:
            Refusal: the split has no example, or a task's own metric failed.
        """
        scores = self._metrics.run(advance, has_records) if self._metrics else {}
        measured = {name: self._measure(name, batches, advance) for name, batches in self._batches.items()}
        return {name: TaskResult(measured.get(name), scores.get(name)) for name in self._names
                if name in measured or name in scores}

    def unigram_losses(self, training_batches: Iterable[dict]) -> dict[str, float]:
        """Returns the loss of a unigram model, by task or mixture; see `held_out_loss.unigram_losses`."""
        with data.refusing_bad_rows(self._description):
            return held_out_loss.unigram_losses(self._config, training_batches, self._batches)

    def _measure(self, name, batches, advance):
        def counted():
            for features in batches:
                yield features
                advance(self._batch_size)

        with data.refusing_bad_rows(self._description):
            measured = held_out_loss.evaluate(self._step, counted())
        if measured is None:
            raise Refusal(f"Split {self._split!r} of {name!r} has no example to evaluate.")
        return measured


def _batches(description, name, num_batches):
    batches = data.get_dataset(dataclasses.replace(description, mixture_or_task_name=name))
    return batches if num_batches is None else batches.take(num_batches).cache()


def average(results: dict[str, TaskResult]) -> float | None:
    """Returns the average over tasks with metrics, see `data.average`; None for fewer than two tasks."""
    scores = {name: result.scores for name, result in results.items() if result.scores is not None}
    return data.average(scores) if len(scores) > 1 else None


def named(values: dict[str, dict[str, float]], average: float | None) -> dict[str, float]:
    """Returns results by the names they are logged under: "eval/<task>/<metric>" and, if there is one, "eval/average".

    Args:
        values: task or mixture -> {name of a metric: value}.
        average: float or None, from `average`.
    """
    entries = {f"eval/{task}/{name}": value for task, metrics in values.items() for name, value in metrics.items()}
    return entries if average is None else {**entries, "eval/average": average}


def declared_directions(results: dict[str, TaskResult]) -> dict[str, bool]:
    """Returns logged name -> whether a lower value is better, for metrics with a name that does not show it."""
    lower = {f"eval/{task}/{name}": is_lower for task, result in results.items() if result.scores is not None
             for name, is_lower in result.scores.lower_is_better.items() if is_lower is not None}
    if lower and all(lower.values()):
        lower["eval/average"] = True
    return {name: is_lower for name, is_lower in lower.items() if is_lower != directions.is_lower_better(name)}
