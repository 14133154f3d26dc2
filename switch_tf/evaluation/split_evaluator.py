"""Evaluates a model on one split of a task or mixture; training and `switch-tf eval` both use it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import keras
import numpy as np

from switch_tf import data, metrics, partitioning
from switch_tf.configs import directions
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.decoding import check_decodes, log_likelihoods
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.inference.programs import compile_features, compile_prediction
from switch_tf.metrics import Measurements
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal


def compile_evaluation(model: keras.Model, settings: StepSettings, partitioner: Partitioner | None = None,
                       objective: Objective | None = None) -> Callable:
    """Traces one evaluation step, without dropout or jitter. Arguments as for `train_step.compile_steps`.

    Returns:
        A function that takes a dict of <int32>[batch, length] and returns Measurements.
    """
    partitioner, objective = partitioner or Partitioner(), objective or Objective()

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            measured = objective.measure(model.config, features, *model.forward(features, training=False), settings)
        return partitioner.sum_over_parts(measured)

    step = partitioner.compile(partitioner.results(call), settings.use_xla)
    return lambda features: step(partitioner.place({name: value[None] for name, value in features.items()}))


def evaluate(step: Callable, batches: Iterable[dict], description: data.DatasetDescription,
             advance: Callable[[int], None] = lambda count: None) -> Measurements:
    """Merges an evaluation step's measurements over batches of a description, in float64.

    Calls `advance` with the number of examples of each batch.
    """
    sums = None
    with data.refusing_bad_rows(description):
        for features in batches:
            sums = metrics.merge(sums, metrics.to_host(step(features)))
            advance(description.batch_size)
    if sums is None:
        raise Refusal(f"Split {description.split!r} of {description.mixture_or_task_name!r} has no example to "
                      "evaluate.")
    return sums


def unigram_losses(config: SwitchConfig, training_batches: Iterable[dict],
                   held_out: dict[str, Iterable[dict]]) -> dict[str, float]:
    """Returns the loss of a model that knows only the frequency of each token in training targets.

    Args:
        config: SwitchConfig.
        training_batches: batches with the targets to count. Every token of the vocabulary counts once more.
        held_out: name -> batches with the targets to compute the loss on.

    Returns:
        Name -> float, in nats per token.
    """
    def count(batches):
        counts = np.zeros(config.vocab_size)
        for features in batches:
            targets, weights = (features[name].numpy().ravel() for name in target_features(config))
            counts += np.bincount(targets, weights=weights, minlength=config.vocab_size)[:config.vocab_size]
        return counts

    counts = 1 + count(training_batches)
    log_probs = np.log(counts / counts.sum())
    held_out_counts = {name: count(batches) for name, batches in held_out.items()}
    return {name: float(-np.sum(counted * log_probs) / counted.sum()) for name, counted in held_out_counts.items()}


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
            means = {"loss": self.measured.loss_terms["cross_entropy"],
                     "accuracy" if self.scores is None else "token_accuracy": self.measured.accuracy}
            values = {name: float(mean.total / (mean.weight or 1.0)) for name, mean in means.items()}
        return values if self.scores is None else values | self.scores.metrics


class SplitEvaluator:
    """Evaluates a model on one split, as often as its weights change.

    Tasks with metrics are scored on greedy predictions as long as the description's targets, and on likelihoods. No
    expert drops a token there (`context.Context.no_drop`), so scores depend neither on the batch size nor on the
    layout. A loss is computed with the configuration's evaluation capacity factor, so tokens may be dropped. Two
    attributes describe the split: `num_examples`, of each task with metrics, and `warnings`, a sentence for each task
    with targets that no prediction can match.

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
    """

    def __init__(self, model: keras.Model, description: data.DatasetDescription, settings: StepSettings,
                 partitioner: Partitioner, objective: Objective, losses_of: Iterable[str] | None = None,
                 num_batches: int | None = None, num_examples: int | None = None):
        name, split = description.mixture_or_task_name, description.split
        tasks = data.names_of_tasks(name, split)
        self._names = list(dict.fromkeys([name, *tasks]))
        self._config, self._description = model.config, description
        self._evaluator, self.num_examples, self.warnings = None, {}, []
        if data.has_metrics(name, split):
            check_decodes(model.config)
            self._evaluator = data.Evaluator(description, num_examples)
            self.num_examples, self.warnings = self._evaluator.num_examples, self._evaluator.warnings
            self._predict = compile_prediction(model, description.task_feature_lengths["targets"], partitioner,
                                               self._evaluator.end_id)
            self._score = compile_features(lambda features: log_likelihoods(model, features), partitioner)
        if losses_of is None:
            losses_of = [task for task in tasks if task not in self.num_examples]
        self._batches = {}
        for task in losses_of:
            batches = data.get_dataset(dataclasses.replace(description, mixture_or_task_name=task))
            self._batches[task] = batches if num_batches is None else batches.take(num_batches).cache()
        self._step = compile_evaluation(model, settings, partitioner, objective)

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
        """
        scores = {}
        if self._evaluator:
            scores = self._evaluator.evaluate(self._predict, self._score, advance, has_records)
        measured = {name: evaluate(self._step, batches, dataclasses.replace(
            self._description, mixture_or_task_name=name), advance) for name, batches in self._batches.items()}
        return {name: TaskResult(measured.get(name), scores.get(name)) for name in self._names
                if name in measured or name in scores}

    def unigram_losses(self, training_batches: Iterable[dict]) -> dict[str, float]:
        """Returns the loss of a unigram model, by task or mixture; see the function of that name."""
        with data.refusing_bad_rows(self._description):
            return unigram_losses(self._config, training_batches, self._batches)


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
