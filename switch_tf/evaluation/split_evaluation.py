"""One model on a whole split: the metrics of each task, and the loss of those that have none."""

import dataclasses
import math
from typing import NamedTuple

from switch_tf import data
from switch_tf.evaluation.evaluation import compile_evaluation, evaluate
from switch_tf.evaluation.scoring import Scoring
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries


class SplitScores(NamedTuple):
    """What a split says of a model.

    `tasks`: name -> {name of a metric, "loss", "accuracy" or "perplexity": float}, in the order of the mixture.
    `average`: float, of the tasks with metrics, see `data.average`; None for fewer than two.
    `records`: task -> a list of what was predicted for each example, see `data.TaskScores`.
    """

    tasks: dict[str, dict[str, float]]
    average: float | None
    records: dict[str, list[dict]]


class SplitEvaluation:
    """Evaluates a model again and again on every example of a split, each task of a mixture by itself.

    A task with metrics is scored as `scoring.Scoring` does. One without, to pretrain on, has a loss: with the
    configuration's own evaluation capacity factor, as a training run logs it, so that tokens may be dropped.

    Args:
        model: SwitchTransformer, built.
        description: data.DatasetDescription of the split.
        settings: StepSettings.
        partitioner: Partitioner.
        num_examples: int or None, at most so many examples of each task with metrics.
    """

    def __init__(self, model, description, settings, partitioner, num_examples=None):
        self._description = description
        self._names = data.names_of_tasks(description.mixture_or_task_name, description.split)
        self._scoring = None
        if data.has_metrics(description.mixture_or_task_name, description.split):
            self._scoring = Scoring(model, description, partitioner, num_examples)
        self._step = compile_evaluation(model, settings, partitioner)

    @property
    def num_examples(self) -> int | None:
        """Of all tasks together; None where it is not known before they are read."""
        scored = self._scoring.num_examples if self._scoring else {}
        return sum(scored.values()) if len(scored) == len(self._names) else None

    @property
    def warnings(self) -> list[str]:
        """A sentence for each task with targets that no prediction can match."""
        return self._scoring.warnings if self._scoring else []

    def run(self, advance=lambda count: None) -> SplitScores:
        """Evaluates the model as its weights are now; `advance` is told how many examples were done."""
        scores = self._scoring.run(advance) if self._scoring else {}
        tasks = {name: scores[name].metrics if name in scores else self._losses(name, advance) for name in self._names}
        return SplitScores(tasks, data.average(scores) if len(scores) > 1 else None,
                           {name: found.records for name, found in scores.items()})

    def _losses(self, task, advance):
        description = dataclasses.replace(self._description, mixture_or_task_name=task)

        def batches():
            for features in data.get_dataset(description):
                yield features
                advance(description.batch_size)

        measured = evaluate(self._step, batches())
        if measured is None:
            raise Refusal(f"Split {description.split!r} of {task!r} has no example to evaluate.")
        found = {name.rpartition("/")[2]: value
                 for name, value in summaries.evaluation_values(task, measured).items()}
        return {**found, "perplexity": math.exp(min(found["loss"], 700.0))}


def values(scores: SplitScores) -> dict[str, float]:
    """What is written of them: `eval/<task>/<metric>` -> float, and `eval/average` where tasks are several."""
    found = {f"eval/{task}/{name}": value for task, measured in scores.tasks.items()
             for name, value in measured.items()}
    return found if scores.average is None else {**found, "eval/average": scores.average}
