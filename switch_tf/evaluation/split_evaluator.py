"""Evaluates a run, or its checkpoints, on a split of a task or mixture."""

import contextlib
import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import data, metrics
from switch_tf.checkpoints import folders, tensors
from switch_tf.configs import directions
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import Run, StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.decoding import check_decodes, log_likelihoods
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.inference.text_model import compile_features, compile_prediction
from switch_tf.metrics import Measurements
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress, summaries
from switch_tf.storage import json_lines, leftovers, lock, outputs
from switch_tf.storage.whole_file import writing


def compile_evaluation(model: keras.Model, settings: StepSettings, partitioner: Partitioner | None = None,
                       objective: Objective | None = None) -> Callable:
    """Traces an evaluation step, without dropout or jitter. Arguments as for `train_step.compile_steps`.

    Returns: Function from a dict of <int32>[batch, length] to Measurements on the host.
    """
    partitioner, objective = partitioner or Partitioner(), objective or Objective()

    def measure(features):
        return objective.measure(model.config, features, *model.forward(features, training=False), settings)

    results = metrics.Vector()
    program = compile_features(measure, partitioner, lambda measured: results.join(
        partitioner.sum_over_parts(measured)), settings.use_xla)
    return lambda features: results.split(program(features))


def evaluate(step: Callable, batches: Iterable[dict], description: data.DatasetDescription,
             advance: Callable[[int], None] = lambda count: None) -> Measurements:
    """Merges an evaluation step's measurements over batches, in float64.

    Calls `advance` with each batch's number of examples.
    """
    sums = None
    with data.refusing_bad_rows(description):
        for features in batches:
            sums = metrics.merge(sums, step(features))
            advance(description.batch_size)
    if sums is None:
        raise Refusal(f"Split {description.split!r} of {description.mixture_or_task_name!r} has no example to "
                      "evaluate.")
    return sums


def unigram_losses(config: SwitchConfig, description: data.DatasetDescription, training_batches: Iterable[dict],
                   held_out: dict[str, Iterable[dict]]) -> dict[str, float]:
    """Returns the loss of a model that knows only the frequency of each token in training targets.

    Args:
        training_batches: Batches to count targets in. Every token of the vocabulary counts once more.
        held_out: Name -> batches with the targets for the loss.

    Returns: Name -> nats per token.
    """
    def count(batches):
        counts = np.zeros(config.vocab_size)
        for features in batches:
            targets, weights = (features[name].numpy().ravel() for name in target_features(config))
            counts += np.bincount(targets, weights=weights, minlength=config.vocab_size)[:config.vocab_size]
        return counts

    with data.refusing_bad_rows(description):
        counts = 1 + count(training_batches)
        held_out_counts = {name: count(batches) for name, batches in held_out.items()}
    log_probs = np.log(counts / counts.sum())
    return {name: float(-np.sum(counted * log_probs) / counted.sum()) for name, counted in held_out_counts.items()}


class TaskResult(NamedTuple):
    """Evaluation results of a task or mixture.

    `measured`: On the host; None if no loss was computed.
    `scores`: None for a mixture and for a task without metrics.
    """

    measured: Measurements | None = None
    scores: data.TaskScores | None = None

    @property
    def values(self) -> dict[str, float]:
        """Values by name: "loss" and "accuracy" over target tokens, and the task's metrics.

        The loss is only the cross-entropy, because other terms do not measure quality. A task with metrics has
        "token_accuracy", because a metric may be called accuracy.
        """
        values = {}
        if self.measured is not None:
            means = {"loss": self.measured.loss_terms["cross_entropy"],
                     "accuracy" if self.scores is None else "token_accuracy": self.measured.accuracy}
            values = {name: summaries.divide(mean) for name, mean in means.items()}
        return values if self.scores is None else values | self.scores.metrics


class SplitEvaluator:
    """Evaluates a model on a split, each time with its current weights.

    Tasks with metrics are scored on greedy predictions up to the description's targets length, and on likelihoods.
    Experts drop no token there (`context.Context.no_drop`), so scores depend neither on batch size nor layout. For a
    loss, the evaluation capacity factor applies.

    Args:
        model, objective: Built.
        losses_of: Tasks and mixtures with a loss. Defaults to the tasks without metrics.
        num_batches: Batches for each loss, kept in memory. None reads the whole split each time.
        num_examples: Most examples of each task with metrics.
    """

    def __init__(self, model: keras.Model, description: data.DatasetDescription, settings: StepSettings,
                 partitioner: Partitioner, objective: Objective, losses_of: Iterable[str] | None = None,
                 num_batches: int | None = None, num_examples: int | None = None):
        name, split = description.mixture_or_task_name, description.split
        tasks = data.names_of_tasks(name, split)
        self._names = list(dict.fromkeys([name, *tasks]))
        self.description = description
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
        self.batches = {}
        for task in losses_of:
            batches = data.get_dataset(dataclasses.replace(description, mixture_or_task_name=task))
            self.batches[task] = batches if num_batches is None else batches.take(num_batches).cache()
        self._step = compile_evaluation(model, settings, partitioner, objective)

    def run(self, advance: Callable[[int], None] = lambda count: None,
            has_records: bool = True) -> dict[str, TaskResult]:
        """Evaluates the model with its current weights. Arguments as for `data.Evaluator.evaluate`.

        Returns: Name of each task or mixture -> TaskResult, a mixture before its tasks.
        """
        scores = {}
        if self._evaluator:
            scores = self._evaluator.evaluate(self._predict, self._score, advance, has_records)
        measured = {name: evaluate(self._step, batches, dataclasses.replace(
            self.description, mixture_or_task_name=name), advance) for name, batches in self.batches.items()}
        return {name: TaskResult(measured.get(name), scores.get(name)) for name in self._names
                if name in measured or name in scores}


def average(results: dict[str, TaskResult]) -> float | None:
    """Returns the average over tasks with metrics, see `data.average`, None for fewer than two."""
    scores = {name: result.scores for name, result in results.items() if result.scores is not None}
    return data.average(scores) if len(scores) > 1 else None


def named(values: dict[str, dict[str, float]], average: float | None) -> dict[str, float]:
    """Returns results by their logged names: "eval/<task>/<metric>" and, unless None, "eval/average".

    Args:
        values: Task or mixture -> {name of a metric: value}.
    """
    entries = {f"eval/{task}/{name}": value for task, metrics in values.items() for name, value in metrics.items()}
    return entries if average is None else {**entries, "eval/average": average}


def declared_directions(results: dict[str, TaskResult]) -> dict[str, bool]:
    """Returns logged name -> whether lower is better, unless the name shows it."""
    lower = {f"eval/{task}/{name}": is_lower for task, result in results.items() if result.scores is not None
             for name, is_lower in result.scores.lower_is_better.items() if is_lower is not None}
    if lower and all(lower.values()):
        lower["eval/average"] = True
    return {name: is_lower for name, is_lower in lower.items() if is_lower != directions.is_lower_better(name)}


class CheckpointEvaluator:
    """Evaluates checkpoints of a model on a split.

    Each checkpoint adds a line to `output/scores.jsonl`. `output/<split>/step_<step>/<task>.jsonl` has its predictions,
    and `output/<split>` the scores for TensorBoard.

    Args:
        described: Experiment on this machine's devices.
        num_examples: See `SplitEvaluator`.
    """

    def __init__(self, described: Experiment, split: str, num_examples: int | None, output: Any):
        run, config, partitioner = described.run, described.config, described.partitioner
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        num_pieces = partitioner.layout.num_pieces("batch")
        if run.batch_size % num_pieces:
            raise Refusal(f"BATCH_SIZE must be a multiple of {num_pieces}, the devices that a batch is split over, "
                          f"not {run.batch_size}.")
        self.output, self._split, self._is_chief = output, split, partitioner.is_chief
        with contextlib.ExitStack() as closing:
            if self._is_chief:
                closing.enter_context(lock.held(output))
            self._model = described.make_model()
            partitioner.build(self._model, draws_weights=False)
            objective = described.make_objective().for_evaluation()
            objective.build(partitioner)
            objective.restore()
            self._evaluator = SplitEvaluator(
                self._model, data.description_of_data(run, config, split, 0), described.settings, partitioner,
                objective, num_examples=num_examples)
            if self._is_chief:
                for warning in self._evaluator.warnings:
                    outputs.say(warning)
                with writing(output / split):
                    (output / split).mkdir(parents=True, exist_ok=True)
                self._events = tf.summary.create_file_writer(str(output / split))
                closing.callback(self._events.close)
            self._closing = closing.pop_all()

    def close(self) -> None:
        """Closes the TensorBoard file and unlocks the folder."""
        self._closing.close()

    def evaluate(self, checkpoint: Any) -> dict:
        """Returns `{"step", "tasks": {task: {metric: float}}, "average", "num_examples"}` for a checkpoint folder.

        `num_examples` is of each task with metrics.
        """
        step = tensors.restore(checkpoint, tensors.state_variables(self._model))["step"]
        # The number of examples of a loss is unknown.
        total = None if self._evaluator.batches else sum(self._evaluator.num_examples.values())
        with progress.bar(total, f"Step {step}", " examples") as bar:
            results = self._evaluator.run(bar.update)
        tasks = {name: add_perplexity(result) for name, result in results.items()}
        average_score = average(results)
        if self._is_chief:
            folder, values = self.output / self._split, named(tasks, average_score)
            predictions = folders.path_of(folder, step)
            leftovers.remove_unfinished(predictions)
            for task, result in results.items():
                if result.scores is not None:
                    data.write_records(predictions / f"{task}.jsonl", result.scores.records)
            json_lines.append(self.output / "scores.jsonl", [{"step": step, "split": self._split, **values}])
            with summaries.writing_events(folder), self._events.as_default(step=step):
                tf.summary.experimental.write_raw_pb(b"".join(map(summaries.message, values, values.values())))
                self._events.flush()
        return {"step": step, "tasks": tasks, "average": average_score, "num_examples": self._evaluator.num_examples}


def add_perplexity(result: TaskResult) -> dict[str, float]:
    """Returns a result's values, with the perplexity if it has no metrics."""
    values = result.values
    return {**values, "perplexity": math.exp(min(values["loss"], 700.0))} if result.scores is None else values


def describe(result: dict) -> str:
    """Returns a table of `CheckpointEvaluator.evaluate`'s result, a row for each task."""
    width = max(len("average"), *map(len, result["tasks"]))
    lines = [f"Step {result['step']}:"]
    for task, scores in result["tasks"].items():
        lines.append(f"  {task:<{width}}  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        if count := result["num_examples"].get(task):
            lines[-1] += f"  ({count:,} examples)"
    if result["average"] is not None:
        lines.append(f"  {'average':<{width}}  {result['average']:.4f}")
    return "\n".join(lines)


_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MOST_GAPS = 3  # in an example; the rest is left out
_MOST_WORDS = 60  # in inputs without gaps


def predict_examples(model: keras.Model, run: Run, partitioner: Partitioner) -> list[tuple[str, str, str]]:
    """Returns (inputs, target, prediction) of the first `run.shown_examples` validation examples, at most a batch."""
    examples = data.examples(data.description_of_data(run, model.config, "validation", 0),
                             min(run.shown_examples, run.batch_size))
    vocabulary = data.target_vocabulary(run.mixture_or_task_name, run.vocabulary)
    inputs = [example["inputs"]["ids"] for example in examples] + [[]] * (run.batch_size - len(examples))
    tokens = keras.utils.pad_sequences(inputs, run.task_feature_lengths["inputs"], padding="post", truncating="post")
    program = compile_prediction(model, run.task_feature_lengths["targets"], partitioner, vocabulary.eos_id)
    predictions = program({"encoder_input_tokens": tokens})
    return [(example["inputs"]["text"], example["targets"]["text"],
             data.spell(vocabulary, np.trim_zeros(ids, "b").tolist()))
            for example, ids in zip(examples, predictions, strict=False)]


def describe_examples(shown: list[tuple[str, str, str]]) -> str:
    """Returns paragraphs to print: gaps as [prediction | target], or inputs, prediction and target."""
    paragraphs = ["Held-out text and what the model fills in: [model | truth]"
                  if any(_SENTINEL.search(inputs) for inputs, *_ in shown) else "Held-out examples:"]
    for number, example in enumerate(shown, 1):
        inputs, target, prediction = (text.replace("</s>", "").strip() for text in example)
        text, gaps = _split(inputs)
        if gaps:
            guesses, truths = ({number: following.strip() for number, following in reversed(_split(answer)[1])}
                               for answer in (prediction, target))  # the first of equal sentinels wins
            for gap, following in gaps[:_MOST_GAPS]:
                text += f"[{guesses.get(gap, '')} | {truths.get(gap, '')}]{following}"
            text += "..." * (len(gaps) > _MOST_GAPS)
        else:
            words = inputs.split()
            text = (" ".join(words[:_MOST_WORDS]) + "..." * (len(words) > _MOST_WORDS)
                    + f"\nmodel: {prediction}\ntruth: {target}")
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, 110)]
        paragraphs.append(f"{number}. " + "\n   ".join(lines))
    return "\n".join(paragraphs)


def _split(text):
    first, *rest = _SENTINEL.split(text)
    return first, list(zip(rest[::2], rest[1::2], strict=True))
