"""Reads the curves of a run over steps, time, tokens and FLOPs, and its configuration."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import fairness
from switch_tf.refusals import Refusal, first_line
from switch_tf.reporting import figures, report
from switch_tf.storage import json_lines, places

# Required fields of a run's record, with a check of each value.
_NEEDED = {
    "MIXTURE_OR_TASK_NAME": lambda value: isinstance(value, str),
    "optimizer": lambda value: isinstance(value, str),
    "SEED": json_lines.is_step,
    "BATCH_SIZE": lambda value: json_lines.is_step(value) and 0 < value < 2**31,
    "TASK_FEATURE_LENGTHS": lambda value: isinstance(value, dict) and {"inputs", "targets"} <= value.keys() and all(
        json_lines.is_step(length) and length < 2**31 for length in value.values()),
}
# Number of evaluations to average, because a single loss depends on the last batch.
SMOOTHING = 3


@dataclasses.dataclass(frozen=True)
class Curves:
    """The evaluations of a run.

    `name`: Name of the variant.
    `folder`: Run folder.
    `checkpoint`: `folders.identity` of the newest checkpoint.
    `record`: Configuration, from `continuation.record`.
    `config`: SwitchConfig.
    `steps`: Steps of evaluations, without the one before the first step.
    `losses`: Smoothed losses of the mixture.
    `values`: Name of any other value of evaluations -> (steps, values), not smoothed.
    `seconds`, `tokens`: Training time and tokens from the start to each of `steps`.
    `step_times`: Logged step -> seconds per step before it.
    """

    name: str
    seed: int
    folder: pathlib.Path
    checkpoint: str
    record: dict[str, Any]
    config: Any
    steps: np.ndarray
    losses: np.ndarray
    values: dict[str, tuple[list[int], list[float]]]
    seconds: np.ndarray
    tokens: np.ndarray
    step_times: dict[int, float]

    @property
    def loss_name(self) -> str:
        """Name of the loss in metrics.jsonl."""
        return f"eval/{self.record['MIXTURE_OR_TASK_NAME']}/loss"

    @property
    def flops(self) -> np.ndarray:
        """FLOPs up to each of `steps`, of products with weights. A backward pass counts twice a forward pass."""
        lengths = self.record["TASK_FEATURE_LENGTHS"]
        targets = 0 if self.config.is_encoder_only else lengths["targets"]
        return 3.0 * self.steps * self.record["BATCH_SIZE"] * self.config.flops_per_sequence(lengths["inputs"], targets)


def read(folder: str | pathlib.Path, name: str) -> Curves:
    """Reads a run folder, finished or not.

    Raises:
        Refusal: it is not a run folder, has no checkpoint or no loss yet, or a loss is not finite.
    """
    folder = places.at(folder)
    checkpoint, record = _record(folder)
    records = report.read_metrics(folder)
    loss_name = f"eval/{record['MIXTURE_OR_TASK_NAME']}/loss"
    after_start = [entry for entry in records if entry["step"] > 0]
    steps, losses = figures.series(after_start, loss_name)
    diverged = [entry["step"] for entry in after_start if entry.get(loss_name, 0.0) is None]
    if diverged:
        raise Refusal(f"The run {str(folder)!r} diverged: its held-out loss at step {diverged[0]} is no number. "
                      "Leave it out of the comparison, or train it anew.")
    if not steps:
        raise Refusal(f"The run {str(folder)!r} has no held-out loss after its start ({loss_name} in "
                      "metrics.jsonl); train it with an EVAL_PERIOD above 0.")
    names = {key for entry in records for key in entry if key.startswith("eval/")} - {loss_name}
    times, seconds, tokens = _times(records)
    return Curves(name, record["SEED"], folder, checkpoint, record, fairness.config_of(record), np.array(steps),
                  smoothed(losses),
                  {key: figures.series(records, key) for key in sorted(names) if not key.endswith("/unigram_loss")},
                  np.interp(steps, *seconds), np.interp(steps, *tokens), times)


def of_tasks(run: Curves) -> dict[str, Curves]:
    """Returns a run with the losses of each task of its mixture that was evaluated by itself: task -> Curves."""
    runs = {}
    for name, (steps, values) in run.values.items():
        losses = [value for step, value in zip(steps, values, strict=True) if step > 0]
        if name.endswith("/loss") and len(losses) == len(run.steps):
            runs[name.split("/")[1]] = dataclasses.replace(run, losses=smoothed(losses))
    return runs


def told_apart(runs: list[Curves]) -> list[Curves]:
    """Returns runs with unique names: those that share a name and differ in more than the seed get their path."""
    def others(run):
        return [other for other in runs if other.name == run.name]

    return [run if all(fairness.without_seed(other.record) == fairness.without_seed(run.record) and
                       (other is run or other.seed != run.seed) for other in others(run))
            else dataclasses.replace(run, name=str(run.folder)) for run in runs]


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Returns the mean of each loss and the two before it. The first two have fewer to average.

    Means are exact before they are rounded, so a tie between two runs stays a tie.
    """
    losses = [float(loss) for loss in losses]
    return np.array([statistics.mean(losses[max(0, end - SMOOTHING):end]) for end in range(1, len(losses) + 1)])


def _record(folder):
    for path, description in folders.described(RunFolder.checkpoints_of(folder)):
        record = description["configuration"]
        if not record:
            raise Refusal(f"{path} is of a version that kept no record of the configuration; only runs of this one "
                          "can be compared.")
        _check_record(record, path)
        return folders.identity(description), record
    raise Refusal(f"{str(folder)!r} is no run folder with a checkpoint; a run is compared after it was trained.")


def _check_record(record, path):
    """Raises a Refusal if a field that a comparison needs is missing or damaged."""
    try:
        fairness.config_of(record)
        for name, is_right in _NEEDED.items():
            if not is_right(record.get(name)):
                raise ValueError(f"{name} is missing or damaged")
    except (ValueError, TypeError) as error:
        raise Refusal(f"The configuration in {path / 'checkpoint.json'} cannot be read: {first_line(error)}. Leave "
                      "the run out of the comparison, or copy its folder again.") from error


def _times(records):
    """Returns seconds per step by logged step, and (steps, sums) of seconds and of tokens, without evaluations."""
    names = ("train/seconds_per_step", "train/tokens_per_second")
    timed = [record for record in records if all(record.get(name) is not None for name in names)]
    (steps, per_step), (_, per_second) = (figures.series(timed, name) for name in names)
    lengths = np.diff([0, *steps])
    seconds = np.cumsum(lengths * np.array(per_step))
    tokens = np.cumsum(lengths * np.array(per_step) * np.array(per_second))
    at = [0, *steps]
    return dict(zip(steps, per_step, strict=True)), (at, [0.0, *seconds]), (at, [0.0, *tokens])
