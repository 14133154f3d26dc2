"""Targets in the spelling of predictions, and a count of the targets that no prediction can match.

A prediction is decoded from ids, so it has no trailing blank, no newline, and only the Unicode forms that the
vocabulary normalises to. A target in the spelling of its file may differ from the output of a perfect model.


Metrics of tasks: seqio's Evaluator on predictions and likelihoods of whole batches."""

import contextlib
import functools
import logging
import pathlib
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from switch_tf import checks
from switch_tf.configs import directions
from switch_tf.data.evaluation_sets import evaluation_owner
from switch_tf.data.inspection import refusing_bad_rows
from switch_tf.data.pipeline import DatasetDescription, check_description
from switch_tf.data.providers import check_split, get_provider, import_seqio, replace_tasks, tasks_of
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines
from switch_tf.storage.whole_file import write_whole

if TYPE_CHECKING:
    import seqio


_IGNORED = string.punctuation + "‘’´`"  # not the sign of an unknown piece


def is_by_spelling(task: "seqio.Task") -> bool:
    """Returns whether a task compares its targets in the spelling of the vocabulary, as text files do.

    Benchmarks keep their references as published, so that scores can be compared with published ones.
    """
    return bool(getattr(task.source, "compares_by_spelling", False)) and task.postprocessor is None


def by_spelling(task: "seqio.Task", length: int) -> Callable[..., Any]:
    """Returns a postprocessor that spells targets as the task's vocabulary does, and leaves predictions unchanged.

    Args:
        task: seqio.Task.
        length: int. Tokens of targets.
    """
    vocabulary = task.output_features["targets"].vocabulary

    def postprocess(text, example=None, is_target=False, **unused):
        return _spelt(text, _ids(example, vocabulary), vocabulary, length) if is_target else text

    return postprocess


def _spelt(text, ids, vocabulary, length):
    """Returns a target decoded from its ids, unchanged if the ids lack a part of it."""
    if _lacks_pieces(ids, vocabulary):
        return text
    if _is_cut(text, ids, vocabulary, length):
        ids = vocabulary.encode(text)
        return text if _lacks_pieces(ids, vocabulary) else vocabulary.decode(ids)
    return vocabulary.decode(ids)


def unmatched(task: "seqio.Task", examples: Sequence[dict[str, Any]], length: int) -> str | None:
    """Counts the targets that even a prediction of their own ids does not match.

    Args:
        task: seqio.Task.
        examples: Examples of the task from its evaluator.
        length: int. Tokens of targets.

    Returns:
        A sentence with the counts and the first such target, None if every target can be matched.
    """
    vocabulary = task.output_features["targets"].vocabulary
    reasons, first, total = {}, None, 0
    for example in examples:
        total += 1
        text = example.get("targets_pretokenized")
        if not isinstance(text, bytes):
            continue
        text, ids = text.decode(errors="replace"), _ids(example, vocabulary)
        target, prediction = (task.postprocess_fn(spelling, example=example, is_target=is_target)
                              for spelling, is_target in ((text, True), (vocabulary.decode(ids), False)))
        if _is_match(target, prediction):
            continue
        reason = _reason(text, ids, vocabulary, length)
        reasons[reason] = reasons.get(reason, 0) + 1
        first = first or f"{_shown(text)} as {_shown(vocabulary.decode(ids))}"
    if not reasons:
        return None
    counts = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    return (f"{sum(reasons.values())} of {total} targets of {task.name!r} cannot be matched by any prediction, so a "
            f"perfect model scores less than full marks: {counts}. The first is {first}.")


def _shown(text):
    """Returns a short text with visible blanks and newlines."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _ids(example, vocabulary):
    """Returns the ids of an example's target before the end of sequence."""
    ids = np.asarray(example["targets"]).tolist()
    return ids[:ids.index(vocabulary.eos_id)] if vocabulary.eos_id in ids else ids


def _lacks_pieces(ids, vocabulary):
    return vocabulary.unk_id is not None and vocabulary.unk_id in ids


def _is_cut(text, ids, vocabulary, length):
    """Returns whether the ids fill the length and decode to less than the whole text."""
    if len(ids) < length - 1:
        return False
    whole = vocabulary.decode(vocabulary.encode(text))
    return len("".join(vocabulary.decode(ids).split())) < len("".join(whole.split()))


def _reason(text, ids, vocabulary, length):
    if _is_cut(text, ids, vocabulary, length):
        return f"longer than the {length} tokens of targets (TASK_FEATURE_LENGTHS)"
    if _lacks_pieces(ids, vocabulary):
        return "with characters that the vocabulary lacks"
    return "spelt otherwise by the vocabulary"


def _is_match(target, prediction):
    """Returns whether a prediction equals the target, or one of several targets up to case, blanks and punctuation."""
    if isinstance(target, list | tuple | set) and isinstance(prediction, str):
        return any(_squashed(answer) == _squashed(prediction) for answer in target)
    if isinstance(target, np.ndarray) or isinstance(prediction, np.ndarray):
        return np.array_equal(target, prediction)
    return bool(target == prediction)


def _squashed(text):
    """Returns a text without case, blanks and punctuation, which the metrics of SQuAD and TriviaQA ignore."""
    return "".join(character for character in str(text).casefold()
                   if not character.isspace() and character not in _IGNORED)


class TaskScores(NamedTuple):
    """The result of an evaluation of one task.

    `metrics`: name -> float, from the task's metrics.
    `records`: JSON-able, one for each example: `inputs` and `targets` as text, `prediction` (text) or `score` (nats).
    `declared`: name of a metric -> the attribute `lower_is_better` of its function, if it has one.
    """

    metrics: dict[str, float]
    records: list[dict]
    declared: dict[str, bool] | None = None

    @property
    def lower_is_better(self) -> dict[str, bool | None]:
        """Metric -> whether a lower value is better, by its declaration or its name; None if neither says it."""
        return {name: directions.is_lower_better(name, self.declared) for name in self.metrics}


def names_of_tasks(mixture_or_task_name: str, split: str) -> list[str]:
    """Returns the names of the tasks that have a split: the task itself, or some tasks of a mixture."""
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    return [task.name for task in tasks_of(provider, split)]


def has_metrics(mixture_or_task_name: str, split: str) -> bool:
    """Returns whether any task with the split has metrics. Pretraining tasks have none."""
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    return any(task.metric_objs for task in tasks_of(provider, split))


def check_metrics(mixture_or_task_name: str, split: str) -> None:
    """Refuses tasks with metrics that need more than predictions and scores."""
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


def declares_directions(mixture_or_task_name: str, split: str) -> bool:
    """Returns whether any metric of the tasks has the attribute `lower_is_better`."""
    return any(isinstance(getattr(metric, "lower_is_better", None), bool)
               for task in tasks_of(get_provider(mixture_or_task_name), split) for metric in task.metric_fns)


class Evaluator:
    """Scores of the tasks of a split that have metrics, always on the same examples, which are kept in memory.

    `num_examples`: task -> number of examples.
    `warnings`: a sentence for each task with targets that no prediction can match.

    Args:
        description: DatasetDescription. Inputs are cut to its lengths, as in training. `pack` and `seed` do not matter.
        num_examples: int or None. Largest number of examples of each task, from its beginning.

    Raises:
        Refusal: No task has metrics, a metric needs an output that is not computed, or a task has no examples.
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
        with _quiet(), refusing_bad_rows(description), _registered(provider) as registered:
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
        return unmatched(task, examples, self._targets_length)

    def _as_compared(self, task):
        """Returns a task with watched metrics and, if the task compares by spelling, targets spelt as predictions."""
        declared = self._declared[task.name] = {}
        watched = [_watched(metric, declared) for metric in task.metric_fns]
        changes = {"metric_fns": watched} if watched != list(task.metric_fns) else {}
        if is_by_spelling(task):
            changes["postprocess_fn"] = by_spelling(task, self._targets_length)
        return task.replace(**changes) if changes else task

    def evaluate(self, predict: Callable, score: Callable, advance: Callable[[int], None] = lambda count: None,
                 has_records: bool = True) -> dict[str, TaskScores]:
        """Predicts or scores every example, and computes the metrics.

        Args:
            predict: Function of a dict of <int32>[batch, length] features to <int32>[batch, any length] ids. The last
                batch is filled with rows of zeros.
            score: Function of the same to <float>[batch], the log-likelihood of the targets.
            advance: Function that is called with the number of examples since its last call.
            has_records: bool. False leaves records empty; spelling them takes longer than predicting short targets.

        Returns:
            Name of each task with metrics -> TaskScores.

        Raises:
            Refusal: A metric failed.
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
            self._evaluator._metrics_future = None  # otherwise the next evaluation fails by this one
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
    """Registers a task or mixture under the yielded name within this scope."""
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
    """Silences seqio's notes on shorter lengths and missing logs within this scope."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _text(example, name, vocabulary):
    """Returns the text of a feature, as its task wrote it or decoded from its ids."""
    written = example.get(f"{name}_pretokenized")
    return written.decode(errors="replace") if isinstance(written, bytes) else vocabulary.decode(
        example[name].tolist())


def _numbers(metrics):
    """Returns the metrics that are numbers, without the pictures and texts that metrics may return."""
    values = {name: np.asarray(getattr(value, "value", value)) for name, value in metrics.items()}
    return {checks.printable(name): float(value) for name, value in values.items()
            if value.ndim == 0 and value.dtype.kind in "biuf"}


def _watched(metric, declared):
    """Wraps a metric with an attribute `lower_is_better`, so that it adds the names of its values to `declared`."""
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
    """Returns the average over tasks, at least one, of the mean of each task's metrics, as GLUE does.

    Tasks that are the evaluation sets of one task, such as MNLI's two, are averaged first and count once. The result is
    None unless all metrics are known to be better high, or all low: their mean has no meaning.
    """
    groups = {}
    for name, task in scores.items():
        groups.setdefault(evaluation_owner(name), []).append(np.mean(list(task.metrics.values())))
    found = {is_lower for task in scores.values() for is_lower in task.lower_is_better.values()}
    if len(found) > 1 or None in found:
        return None
    return float(np.mean([np.mean(group) for group in groups.values()]))


def write_records(path: pathlib.Path, records: list[dict]) -> None:
    """Writes a JSON object in each line of a file, which appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_lines.dumps(record, ensure_ascii=False) + "\n" for record in records))
