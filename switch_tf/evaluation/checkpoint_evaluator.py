"""Evaluates the checkpoints of a run one after the other, and writes scores and predictions."""

import contextlib
import math
import pathlib
import sys

import tensorflow as tf
from tqdm import tqdm

from switch_tf import data
from switch_tf.checkpoints import folders, tensors
from switch_tf.configs.experiment import Experiment
from switch_tf.evaluation import split_evaluator
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries
from switch_tf.storage import json_lines, leftovers, lock
from switch_tf.storage.whole_file import writing


class CheckpointEvaluator:
    """Evaluates checkpoints of one model on a split.

    Each one adds a line to `output/scores.jsonl`. `output/<split>/step_<step>/<task>.jsonl` holds its predictions, and
    `output/<split>` the scores for TensorBoard.

    Args:
        described: Experiment on this machine's devices.
        split: str, a split of the tasks.
        num_examples: int or None. Largest number of examples of each task with metrics.
        output: pathlib.Path of a folder.
    """

    def __init__(self, described: Experiment, split: str, num_examples: int | None, output: pathlib.Path):
        run, config, partitioner = described.run, described.config, described.partitioner
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        num_pieces = partitioner.layout.num_pieces("batch")
        if run.batch_size % num_pieces:
            raise Refusal(f"BATCH_SIZE must be a multiple of {num_pieces}, the devices that a batch is split over, "
                          f"not {run.batch_size}.")
        self.output, self._split, self._is_chief = output, split, partitioner.is_chief
        self._closing = contextlib.ExitStack()
        if self._is_chief:
            self._closing.enter_context(lock.held(output))
        self._model = described.make_model()
        partitioner.build(self._model)
        objective = described.make_objective().for_evaluation()
        objective.build(partitioner)
        objective.restore()
        self._evaluator = split_evaluator.SplitEvaluator(
            self._model, data.description_of_data(run, config, split, 0), described.settings, partitioner,
            objective, num_examples=num_examples)
        if self._is_chief:
            for warning in self._evaluator.warnings:
                print(warning, file=sys.stderr, flush=True)
            with writing(output / split):
                (output / split).mkdir(parents=True, exist_ok=True)
            self._events = tf.summary.create_file_writer(str(output / split))
            self._closing.callback(self._events.close)

    def close(self) -> None:
        """Closes the TensorBoard file and lets another process write."""
        self._closing.close()

    def evaluate(self, checkpoint: pathlib.Path) -> dict:
        """Returns `{"step", "tasks": {task: {metric: float}}, "average"}` for one checkpoint folder."""
        step = tensors.restore(checkpoint, tensors.state_variables(self._model))["step"]
        with tqdm(total=self._evaluator.total_examples, desc=f"Step {step}", unit=" examples", file=sys.stderr,
                  dynamic_ncols=True, disable=None) as bar:
            results = self._evaluator.run(bar.update)
        tasks = {name: with_perplexity(result) for name, result in results.items()}
        average = split_evaluator.average(results)
        if self._is_chief:
            folder, values = self.output / self._split, split_evaluator.named(tasks, average)
            predictions = folders.path_of(folder, step)
            leftovers.remove_unfinished(predictions)
            for task, result in results.items():
                if result.scores is not None:
                    data.write_records(predictions / f"{task}.jsonl", result.scores.records)
            json_lines.append(self.output / "scores.jsonl", [{"step": step, "split": self._split, **values}])
            with summaries.writing_events(folder), self._events.as_default(step=step):
                for name, value in values.items():
                    tf.summary.scalar(name, value)
                self._events.flush()
        return {"step": step, "tasks": tasks, "average": average}


def with_perplexity(result: split_evaluator.TaskResult) -> dict[str, float]:
    """Returns the values of a result; of one without metrics with the perplexity."""
    values = result.values
    return {**values, "perplexity": math.exp(min(values["loss"], 700.0))} if result.scores is None else values


def describe(result: dict) -> str:
    """Returns a table of a result of `CheckpointEvaluator.evaluate`, with a row for each task."""
    width = max(len("average"), *map(len, result["tasks"]))
    lines = [f"Step {result['step']}:"]
    for task, scores in result["tasks"].items():
        lines.append(f"  {task:<{width}}  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))
    if result["average"] is not None:
        lines.append(f"  {'average':<{width}}  {result['average']:.4f}")
    return "\n".join(lines)
