"""The checkpoints of a run, one after the other: restored, evaluated on a split, and what was found written down."""

import contextlib
import sys

import tensorflow as tf
from tqdm import tqdm

from switch_tf import data
from switch_tf.checkpoints import tensors
from switch_tf.evaluation import split_evaluation
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries
from switch_tf.storage import json_lines, leftovers, output_lock
from switch_tf.storage.whole_file import writing


class Evaluating:
    """Evaluates checkpoints of one model.

    `output/scores.jsonl` gains a line for each, `output/<split>/step_<step>/<task>.jsonl` holds the predictions,
    `output/<split>` the same scores for TensorBoard.

    Args:
        described: what has a `run`, `settings`, `config`, `partitioner` and `make_model`, as `cli.gin_run.GinRun`.
        split: str, of the tasks.
        num_examples: int or None, of each task with metrics at most so many.
        output: pathlib.Path of a folder.

    Raises:
        Refusal: the task has no such split, none of its examples can be evaluated, or another process writes there.
        OSError: `output` cannot be written.
    """

    def __init__(self, described, split, num_examples, output):
        run, config, partitioner = described.run, described.config, described.partitioner
        data.check_task(run.mixture_or_task_name)
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        num_pieces = partitioner.layout.num_pieces("batch")
        if run.batch_size % num_pieces:
            raise Refusal(f"BATCH_SIZE must be a multiple of {num_pieces}, the devices that a batch is split over, "
                          f"not {run.batch_size}.")
        description = data.description_of_data(run, config, split, 0)
        self.output = output
        self._split = split
        self._closing = contextlib.ExitStack()
        if partitioner.is_chief:
            self._closing.enter_context(output_lock.held(output))
        self._model = described.make_model()
        partitioner.build(self._model)
        self._evaluation = split_evaluation.SplitEvaluation(self._model, description, described.settings, partitioner,
                                                            num_examples)
        self._is_chief = partitioner.is_chief
        self._events = None
        if self._is_chief:
            for warning in self._evaluation.warnings:
                print(warning, file=sys.stderr, flush=True)
            with writing(output / split):
                (output / split).mkdir(parents=True, exist_ok=True)
            self._events = tf.summary.create_file_writer(str(output / split))

    def close(self) -> None:
        """Ends the TensorBoard file, and lets another process write."""
        if self._events is not None:
            self._events.close()
        self._closing.close()

    def evaluate(self, checkpoint) -> dict:
        """`{"step", "tasks": {task: {metric: float}}, "average"}` of one checkpoint folder.

        Raises:
            BrokenCheckpoint, Refusal: it cannot be read, or is of another model.
        """
        step = tensors.restore(checkpoint, tensors.state_variables(self._model))["step"]
        with tqdm(total=self._evaluation.num_examples, desc=f"Step {step}", unit=" examples", file=sys.stderr,
                  dynamic_ncols=True, disable=None) as bar:
            scores = self._evaluation.run(bar.update)
        if self._is_chief:
            self._write(step, scores)
        return {"step": step, "tasks": scores.tasks, "average": scores.average}

    def _write(self, step, scores):
        predictions = self.output / self._split / f"step_{step:08d}"
        leftovers.remove_unfinished(predictions)
        for task, records in scores.records.items():
            data.write_records(predictions / f"{task}.jsonl", records)
        values = split_evaluation.values(scores)
        json_lines.append(self.output / "scores.jsonl", {"step": step, "split": self._split, **values})
        with summaries.writing_events(self.output / self._split), self._events.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
            self._events.flush()
