"""Metrics of tasks: seqio's Evaluator, fed with predictions and likelihoods of whole batches."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from switch_tf import checks
from switch_tf.configs import directions
from switch_tf.data import comparing
from switch_tf.data.description import DatasetDescription, check_description
from switch_tf.data.evaluation_sets import evaluation_owner
from switch_tf.data.example_files import refusing_bad_data
from switch_tf.data.providers import check_split, get_provider, import_seqio, replace_tasks, tasks_of
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines
from switch_tf.storage.whole_file import write_whole, writing


class TaskScores(NamedTuple):
    """What an evaluation found of one task.

    `metrics`: name -> float, as the task's metrics give them.
    `records`: an example each, JSON-able: `inputs` and `targets` as text, `prediction` (text) or `score` (nats).
    `declared`: name of a metric -> whether a lower value is better, where its function says so (`lower_is_better`).
    """

    metrics: dict[str, float]
    records: list[dict]
    declared: dict[str, bool] | None = None

    @property
    def lower_is_better(self) -> dict[str, bool]:
        """Whether a lower value of each metric is better: as it declares, else by its name."""
        return {name: directions.is_lower_better(name, self.declared) for name in self.metrics}


def names_of_tasks(mixture_or_task_name: str, split: str) -> list[str]:
    """Names of the tasks that a split is read from: the task itself, or those of a mixture that have the split."""
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    return [task.name for task in tasks_of(provider, split)]


def has_metrics(mixture_or_task_name: str, split: str) -> bool:
    """Whether some task that a split is read from has metrics; those to pretrain on have none."""
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    return any(task.metric_objs for task in tasks_of(provider, split))


def check_metrics(mixture_or_task_name: str, split: str) -> None:
    """Refuses tasks whose metrics ask for more than predictions and scores.

    Raises:
        Refusal: names the task.
    """
    kinds = import_seqio().metrics.ModelOutputType
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    for task in tasks_of(provider, split):
        for metric in task.metric_objs:
            kind = metric.model_output_type
            if kind not in (kinds.PREDICTION, kinds.SCORE):
                raise Refusal(f"A metric of task {task.name!r} asks for {kinds.to_str(kind)}, and evaluation "
                              "computes predictions and scores; write it as metric_fn(targets, predictions) or "
                              "metric_fn(targets, scores).")


class Evaluator:
    """Scores the tasks of a split that have metrics, again and again on the same examples, which are kept in memory.

    Args:
        description: DatasetDescription. Inputs are cut to its lengths, as in training; `pack` and `seed` do not matter.
        num_examples: int or None, at most so many of each task, from its beginning.

    Raises:
        Refusal: no task has metrics, a metric needs what is not computed, or a split has no examples.

    `num_examples` of each task and `warnings`, a sentence for each task with targets that no prediction can match, are
    attributes.
    """

    def __init__(self, description: DatasetDescription, num_examples: int | None = None):
        check_description(description)
        checks.optional("num_examples", num_examples, checks.integer, 1)
        seqio = import_seqio()
        name, split = description.mixture_or_task_name, description.split
        provider = get_provider(name, description.vocabulary)
        check_split(provider, split)
        self._kinds = seqio.metrics.ModelOutputType
        tasks = [task for task in tasks_of(provider, split) if task.metric_objs]
        if not tasks:
            raise Refusal(f"No task of {name!r} has metrics on split {split!r}; a task without is evaluated by its "
                          "loss.")
        check_metrics(name, split)
        self._batch_size = description.batch_size
        self._targets_length = description.task_feature_lengths["targets"]
        self._declared = {}
        provider = replace_tasks(provider, self._as_compared)
        tasks = [task for task in tasks_of(provider, split) if task.metric_objs]
        self.end_id = provider.output_features["targets"].vocabulary.eos_id
        with _quiet(), refusing_bad_data(), _registered(provider) as registered:
            self._evaluator = seqio.Evaluator(
                registered, seqio.EncDecFeatureConverter(pack=False), split, sequence_length=dict(
                    description.task_feature_lengths), num_examples=num_examples)
        self.num_examples = {task.name: int(self._evaluator.cached_task_datasets[task.name].cardinality())
                             for task in tasks}
        empty = [task for task, count in self.num_examples.items() if not count]
        if empty:
            raise Refusal(f"Split {split!r} of {' and '.join(map(repr, empty))} has no example to evaluate.")
        self.warnings = [sentence for task in tasks if (sentence := self._warning(task))]

    def _warning(self, task):
        if not any(metric.model_output_type == self._kinds.PREDICTION for metric in task.metric_objs):
            return None
        examples = self._evaluator.cached_task_datasets[task.name].as_numpy_iterator()
        return comparing.unmatched(task, examples, self._targets_length)

    def _as_compared(self, task):
        """A task whose targets are spelt as predictions are, where it asks for that, and whose metrics are watched."""
        declared = self._declared[task.name] = {}
        watched = [_watched(metric, declared) for metric in task.metric_fns]
        changes = {"metric_fns": watched} if watched != list(task.metric_fns) else {}
        if comparing.is_by_spelling(task):
            changes["postprocess_fn"] = comparing.by_spelling(task, self._targets_length)
        return task.replace(**changes) if changes else task

    def evaluate(self, predict: Callable, score: Callable, advance=lambda count: None,
                 has_records=True) -> dict[str, TaskScores]:
        """Predicts or scores every example, and computes the metrics.

        Args:
            predict: function of dict of <int32>[batch, length] features to <int32>[batch, any length] ids; a last batch
                is filled with rows of zeros.
            score: function of the same to <float>[batch], the log-likelihood of the targets.
            advance: function that is told how many examples were done since it was told before.
            has_records: bool. Otherwise records are empty; to spell them takes longer than to predict short targets.

        Returns:
            Name of each task that has metrics -> TaskScores.

        Raises:
            Refusal: the task and what its metric said.
        """

        def of_all(function, features_wanted):
            def on_rows(dataset):
                return list(enumerate(self._rows(function, features_wanted, dataset, advance)))

            return on_rows

        future, outputs = self._evaluator.evaluate(
            compute_metrics=True, predict_fn=of_all(predict, ("encoder_input_tokens",)), score_fn=of_all(score, None))
        try:
            metrics = future.result()
        except ValueError as error:  # seqio's, around whatever a metric raises
            self._evaluator._metrics_future = None  # or the next evaluation would fail by this one
            raise Refusal(f"{first_line(error).rstrip('.')}.") from error
        return {task.name: TaskScores(_numbers(metrics[task.name]),
                                      self._records(task, outputs[task.name]) if has_records else [],
                                      dict(self._declared[task.name]) or None)
                for task in self._evaluator.eval_tasks}

    def _rows(self, function, wanted, dataset, advance):
        for _, features in dataset.batch(self._batch_size).as_numpy_iterator():
            count = len(features["encoder_input_tokens"])
            filled = {name: np.pad(value, ((0, self._batch_size - count), (0, 0))) for name, value in features.items()
                      if wanted is None or name in wanted}
            yield from np.asarray(function(filled))[:count]
            advance(count)

    def _records(self, task, outputs):
        vocabularies = {name: feature.vocabulary for name, feature in task.output_features.items()}
        examples = self._evaluator.cached_task_datasets[task.name].as_numpy_iterator()
        records = [{name: _text(example, name, vocabularies[name]) for name in ("inputs", "targets")}
                   for example in examples]
        for record, ids in zip(records, outputs.get(self._kinds.PREDICTION, ()), strict=False):
            record["prediction"] = vocabularies["targets"].decode(ids.tolist())
        for record, score in zip(records, outputs.get(self._kinds.SCORE, ()), strict=False):
            record["score"] = float(score)
        return records


@contextlib.contextmanager
def _registered(provider):
    """Within this scope a task or mixture has the name that is handed out: one with another vocabulary has none."""
    seqio = import_seqio()
    registry = seqio.MixtureRegistry if isinstance(provider, seqio.Mixture) else seqio.TaskRegistry
    name = f"{provider.name} as evaluated"
    registry.add_provider(name, provider)
    try:
        yield name
    finally:
        registry.remove(name)


@contextlib.contextmanager
def _quiet():
    """Within this scope seqio does not say that lengths could be shorter, and that it keeps no logs of its own."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _text(example, name, vocabulary):
    """A feature as its task wrote it, or as its ids read."""
    written = example.get(f"{name}_pretokenized")
    return written.decode(errors="replace") if isinstance(written, bytes) else vocabulary.decode(
        example[name].tolist())


def _numbers(metrics):
    """What of a task's metrics is a number; pictures and texts that a metric may draw are not."""
    values = {name: np.asarray(getattr(value, "value", value)) for name, value in metrics.items()}
    return {name: float(value) for name, value in values.items() if value.ndim == 0 and value.dtype.kind in "biuf"}


def _watched(metric, declared):
    """A metric function that adds its values' names to `declared`, where it has an attribute `lower_is_better`."""
    is_lower = getattr(metric, "lower_is_better", None)
    if not isinstance(is_lower, bool):
        return metric

    @functools.wraps(metric)
    def measure(*args, **kwargs):
        values = metric(*args, **kwargs)
        declared.update(dict.fromkeys(values, is_lower))
        return values

    return measure


def average(scores: dict[str, TaskScores]) -> float | None:
    """Averages over tasks, at least one, the mean of each task's metrics, as GLUE does.

    Tasks that are the evaluation sets of one task, as MNLI's two, are averaged first and count once. None where some
    metrics are better high and others low: their mean says nothing.
    """
    groups = {}
    for name, task in scores.items():
        groups.setdefault(evaluation_owner(name), []).append(np.mean(list(task.metrics.values())))
    if len({is_lower for task in scores.values() for is_lower in task.lower_is_better.values()}) > 1:
        return None
    return float(np.mean([np.mean(group) for group in groups.values()]))


def write_records(path, records: list[dict]) -> None:
    """Writes one JSON object a line, in one step."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_lines.dumps(record, ensure_ascii=False) + "\n" for record in records))
