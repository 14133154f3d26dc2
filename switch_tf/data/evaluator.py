"""Metrics of tasks: seqio's Evaluator on predictions and likelihoods of whole batches.

A decoded prediction has no trailing blank or newline, and only the vocabulary's normalised Unicode forms.
"""

import collections
import functools
import logging
import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from switch_tf import checks
from switch_tf.configs import directions
from switch_tf.data.evaluation_sets import evaluation_owner
from switch_tf.data.pipeline import DatasetDescription, check_description, refusing_bad_rows
from switch_tf.data.vocabularies import get_provider, import_seqio, replace_tasks, tasks_of
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines
from switch_tf.storage.whole_file import write_whole

# The metrics of SQuAD and TriviaQA ignore blanks and punctuation, but not the sign of an unknown piece.
_IGNORED = re.compile(rf"[\s{re.escape(string.punctuation)}‘’´`]")


class TaskScores(NamedTuple):
    """The evaluation result of one task.

    `records`: JSON-able `inputs` and `targets` as text, `prediction` (text) or `score` (nats) of each example.
    `declared`: Metric -> `lower_is_better` of its function, if declared.
    """

    metrics: dict[str, float]
    records: list[dict]
    declared: dict[str, bool] | None = None

    @property
    def lower_is_better(self) -> dict[str, bool | None]:
        """Metric -> whether lower is better, by its declaration or its name. None if unknown."""
        return {name: directions.is_lower_better(name, self.declared) for name in self.metrics}


def names_of_tasks(mixture_or_task_name: str, split: str) -> list[str]:
    """Returns the names of tasks that have a split."""
    return [task.name for task in tasks_of(get_provider(mixture_or_task_name), split)]


def has_metrics(mixture_or_task_name: str, split: str) -> bool:
    """Whether any task with the split has metrics. Refuses metrics of anything but predictions and scores."""
    tasks, kinds = tasks_of(get_provider(mixture_or_task_name), split), import_seqio().metrics.ModelOutputType
    for task in tasks:
        for metric in task.metric_objs:
            kind = metric.model_output_type
            if kind not in (kinds.PREDICTION, kinds.SCORE):
                raise Refusal(f"A metric of task {task.name!r} asks for {kinds.to_str(kind)}, and evaluation "
                              "computes predictions and scores; write it as metric_fn(targets, predictions) or "
                              "metric_fn(targets, scores).")
    return any(task.metric_objs for task in tasks)


def declares_directions(mixture_or_task_name: str, split: str) -> bool:
    """Whether any metric of the tasks has `lower_is_better`."""
    return any(_declares(metric) for task in tasks_of(get_provider(mixture_or_task_name), split)
               for metric in task.metric_fns)


def _declares(metric):
    return isinstance(getattr(metric, "lower_is_better", None), bool)


class Evaluator:
    """Scores of a split's tasks with metrics, always on the same examples, kept in memory.

    `num_examples`: Task -> number of examples.
    `warnings`: A sentence for each task with targets that no prediction can match.

    Args:
        description: Inputs are cut to its lengths. `pack` and `seed` do not matter.
        num_examples: Largest number of examples of each task.
    """

    def __init__(self, description: DatasetDescription, num_examples: int | None = None):
        check_description(description)
        checks.optional("num_examples", num_examples, checks.integer, 1)
        seqio = import_seqio()
        name, split = description.mixture_or_task_name, description.split
        provider = get_provider(name, description.vocabulary)
        self._kinds = seqio.metrics.ModelOutputType
        if not has_metrics(name, split):
            raise Refusal(f"No task of {name!r} has metrics on split {split!r}; a task without is evaluated by its "
                          "loss.")
        self._batch_size = description.batch_size
        self._targets_length = description.task_feature_lengths["targets"]
        self._declared = {}
        provider = replace_tasks(provider, self._prepare_task)
        self.end_id = provider.output_features["targets"].vocabulary.eos_id
        registry = seqio.MixtureRegistry if isinstance(provider, seqio.Mixture) else seqio.TaskRegistry
        registered, logger = f"{provider.name} as evaluated", logging.getLogger("absl")
        level = logger.level
        registry.add_provider(registered, provider)
        logger.setLevel(logging.ERROR)  # seqio's notes on shorter lengths and missing logs
        try:
            with refusing_bad_rows(description):
                self._evaluator = seqio.Evaluator(
                    registered, seqio.EncDecFeatureConverter(pack=False), split, sequence_length=dict(
                        description.task_feature_lengths), num_examples=num_examples)
        finally:
            logger.setLevel(level)
            registry.remove(registered)
        tasks = self._evaluator.eval_tasks
        self.num_examples = {task.name: int(self._evaluator.cached_task_datasets[task.name].cardinality())
                             for task in tasks}
        empty = [task for task, count in self.num_examples.items() if not count]
        if empty:
            raise Refusal(f"Split {split!r} of {' and '.join(map(repr, empty))} has no example to evaluate.")
        self.warnings = [sentence for task in tasks if (sentence := self._warning(task))]

    def _prepare_task(self, task):
        """Spells targets as predictions where a source asks for it. Benchmarks keep their published references."""
        declared, changes = self._declared.setdefault(task.name, {}), {}

        def spell_target(text, example=None, is_target=False, **unused):
            if not is_target:
                return text
            vocabulary = task.output_features["targets"].vocabulary
            ids = _ids(example, vocabulary)
            if not _lacks_pieces(ids, vocabulary) and _is_cut(text, ids, vocabulary, self._targets_length):
                ids = vocabulary.encode(text)
            return text if _lacks_pieces(ids, vocabulary) else vocabulary.decode(ids)

        if any(map(_declares, task.metric_fns)):
            changes["metric_fns"] = [_watched(metric, declared) if _declares(metric) else metric
                                     for metric in task.metric_fns]
        if getattr(task.source, "compares_by_spelling", False) and task.postprocessor is None:
            changes["postprocess_fn"] = spell_target
        return task.replace(**changes) if changes else task

    def _warning(self, task):
        """Returns a sentence about targets that even their own ids do not match, or None."""
        if not any(metric.model_output_type == self._kinds.PREDICTION for metric in task.metric_objs):
            return None
        vocabulary, length = task.output_features["targets"].vocabulary, self._targets_length
        reasons, first = collections.Counter(), None
        for example in self._evaluator.cached_task_datasets[task.name].as_numpy_iterator():
            text = example.get("targets_pretokenized")
            if not isinstance(text, bytes):
                continue
            text, ids = text.decode(errors="replace"), _ids(example, vocabulary)
            spelling = vocabulary.decode(ids)
            if _is_match(task.postprocess_fn(text, example=example, is_target=True),
                         task.postprocess_fn(spelling, example=example, is_target=False)):
                continue
            reason = "spelt otherwise by the vocabulary"
            if _is_cut(text, ids, vocabulary, length):
                reason = f"longer than the {length} tokens of targets (TASK_FEATURE_LENGTHS)"
            elif _lacks_pieces(ids, vocabulary):
                reason = "with characters that the vocabulary lacks"
            reasons[reason] += 1
            first = first or " as ".join(repr(shown if len(shown) <= 80 else f"{shown[:80]}...")
                                         for shown in (text, spelling))
        if not reasons:
            return None
        counts = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
        return (f"{reasons.total()} of {self.num_examples[task.name]} targets of {task.name!r} cannot be matched by "
                f"any prediction, so a perfect model scores less than full marks: {counts}. The first is {first}.")

    def evaluate(self, predict: Callable, score: Callable, advance: Callable[[int], None] = lambda count: None,
                 has_records: bool = True) -> dict[str, TaskScores]:
        """Predicts or scores every example, and computes the metrics.

        Args:
            predict: Function from {feature: <int32>[batch, length]} to <int32>[batch, any length] ids. The last batch
                is filled with rows of zeros.
            score: Function from the same features to <float>[batch], the log-likelihood of the targets.
            advance: Called with the number of examples since its last call.
            has_records: False leaves records empty; spelling them is slow.
        """

        def of_all(function, wanted, dataset):
            rows = []
            for _, features in dataset.batch(self._batch_size).as_numpy_iterator():
                count = len(features["encoder_input_tokens"])
                rows += list(np.asarray(function({
                    name: np.pad(value, ((0, self._batch_size - count), (0, 0))) for name, value in features.items()
                    if wanted is None or name in wanted}))[:count])
                advance(count)
            return list(enumerate(rows))

        future, outputs = self._evaluator.evaluate(
            compute_metrics=True, predict_fn=functools.partial(of_all, predict, ("encoder_input_tokens",)),
            score_fn=functools.partial(of_all, score, None))
        try:
            metrics = future.result()
        except ValueError as error:  # seqio's, around a metric's error
            self._evaluator._metrics_future = None  # or the next evaluation raises it again
            raise Refusal(f"{first_line(error).rstrip('.')}.") from error
        return {task.name: TaskScores(_numbers(metrics[task.name]),
                                      self._records(task, outputs[task.name]) if has_records else [],
                                      dict(self._declared[task.name]) or None)
                for task in self._evaluator.eval_tasks}

    def _records(self, task, outputs):
        features, records = task.output_features, []
        for example in self._evaluator.cached_task_datasets[task.name].as_numpy_iterator():
            record = {}
            for name in ("inputs", "targets"):
                text = example.get(f"{name}_pretokenized")
                record[name] = text.decode(errors="replace") if isinstance(text, bytes) else (
                    features[name].vocabulary.decode(example[name].tolist()))
            records.append(record)
        for record, ids in zip(records, outputs.get(self._kinds.PREDICTION, ()), strict=False):
            record["prediction"] = features["targets"].vocabulary.decode(ids.tolist())
        for record, score in zip(records, outputs.get(self._kinds.SCORE, ()), strict=False):
            record["score"] = float(score)
        return records





def _ids(example, vocabulary):
    ids = np.asarray(example["targets"]).tolist()
    return ids[:ids.index(vocabulary.eos_id)] if vocabulary.eos_id in ids else ids


def _lacks_pieces(ids, vocabulary):
    return vocabulary.unk_id is not None and vocabulary.unk_id in ids


def _is_cut(text, ids, vocabulary, length):
    """Whether ids fill the length and decode to less than the whole text."""
    if len(ids) < length - 1:
        return False
    whole = vocabulary.decode(vocabulary.encode(text))
    return len("".join(vocabulary.decode(ids).split())) < len("".join(whole.split()))


def _is_match(target, prediction):
    if isinstance(target, list | tuple | set) and isinstance(prediction, str):
        return any(_squashed(answer) == _squashed(prediction) for answer in target)
    if isinstance(target, np.ndarray) or isinstance(prediction, np.ndarray):
        return np.array_equal(target, prediction)
    return bool(target == prediction)


def _squashed(text):
    return _IGNORED.sub("", str(text).casefold())


def _numbers(metrics):
    values = {name: np.asarray(getattr(value, "value", value)) for name, value in metrics.items()}
    return {checks.printable(name): float(value) for name, value in values.items()
            if value.ndim == 0 and value.dtype.kind in "biuf"}


def _watched(metric, declared):
    """Records `lower_is_better` in `declared` for each value."""

    @functools.wraps(metric)
    def measure(*args, **kwargs):
        values = metric(*args, **kwargs)
        declared.update(dict.fromkeys(values, metric.lower_is_better))
        return values

    return measure


def average(scores: dict[str, TaskScores]) -> float | None:
    """Returns the average over tasks of each task's mean metric, as GLUE does.

    A task's evaluation sets, such as MNLI's two, are averaged first. None if metrics differ in direction or lack one,
    because their mean has no meaning.
    """
    groups = {}
    for name, task in scores.items():
        groups.setdefault(evaluation_owner(name), []).append(np.mean(list(task.metrics.values())))
    kinds = {is_lower for task in scores.values() for is_lower in task.lower_is_better.values()}
    if len(kinds) > 1 or None in kinds:
        return None
    return float(np.mean([np.mean(group) for group in groups.values()]))


def write_records(path: Any, records: list[dict]) -> None:
    """Writes one JSON object a line, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_lines.dumps(record, ensure_ascii=False) + "\n" for record in records))
