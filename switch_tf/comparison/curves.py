"""Reads the curves of a run over steps, time, tokens and FLOPs, and its configuration."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from switch_tf.checkpoints import continuation, folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import fairness
from switch_tf.configs.switch_config import SwitchConfig
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
    `seconds`, `tokens`, `flops`: Training time, tokens, and FLOPs of products with weights, from the start to each of
        `steps`. A backward pass counts twice a forward pass.
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
    flops: np.ndarray
    step_times: dict[int, float]

    @property
    def loss_name(self) -> str:
        """Name of the loss in metrics.jsonl."""
        return f"eval/{self.record['MIXTURE_OR_TASK_NAME']}/loss"


def read(folder: str | pathlib.Path, name: str) -> Curves:
    """Reads a run folder, finished or not. Refuses one without a checkpoint or a loss, and a loss that is not finite.
    """
    folder = places.at(folder)
    checkpoint, record, config = _configuration(folder)
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
    of_times = "train/seconds_per_step", "train/tokens_per_second"
    timed = [entry for entry in records if all(entry.get(name) is not None for name in of_times)]
    (logged, per_step), (_, per_second) = (figures.series(timed, name) for name in of_times)
    seconds = np.diff([0, *logged]) * np.array(per_step)  # of training, without evaluations
    seconds, tokens = (np.interp(steps, [0, *logged], [0.0, *np.cumsum(values)])
                       for values in (seconds, seconds * np.array(per_second)))
    lengths = record["TASK_FEATURE_LENGTHS"]
    flops = config.flops_per_sequence(lengths["inputs"], 0 if config.is_encoder_only else lengths["targets"])
    return Curves(name, record["SEED"], folder, checkpoint, record, config, np.array(steps), smoothed(losses),
                  {key: figures.series(records, key) for key in sorted(names) if not key.endswith("/unigram_loss")},
                  seconds, tokens, 3.0 * np.array(steps) * record["BATCH_SIZE"] * flops,
                  dict(zip(logged, per_step, strict=True)))


def _configuration(folder):
    """Returns the identity, record and SwitchConfig of the newest checkpoint."""
    for path, description in folders.described(RunFolder.checkpoints_of(folder)):
        record = description["configuration"]
        if not record:
            raise Refusal(f"{path} is of a version that kept no record of the configuration; only runs of this one "
                          "can be compared.")
        try:
            config = SwitchConfig(**continuation.model_fields(record))
            for name, is_right in _NEEDED.items():
                if not is_right(record.get(name)):
                    raise ValueError(f"{name} is missing or damaged")
        except (ValueError, TypeError) as error:
            raise Refusal(f"The configuration in {path / 'checkpoint.json'} cannot be read: {first_line(error)}. Leave "
                          "the run out of the comparison, or copy its folder again.") from error
        return folders.identity(description), record, config
    raise Refusal(f"{str(folder)!r} is no run folder with a checkpoint; a run is compared after it was trained.")


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
    def is_seed(run):
        others = [other for other in runs if other.name == run.name and other is not run]
        return all(other.seed != run.seed and fairness.without_seed(other.record) == fairness.without_seed(run.record)
                   for other in others)

    return [run if is_seed(run) else dataclasses.replace(run, name=str(run.folder)) for run in runs]


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Returns the mean of each loss and the two before it. The first two have fewer to average.

    Means are exact before they are rounded, so a tie between two runs stays a tie.
    """
    losses = [float(loss) for loss in losses]
    return np.array([statistics.mean(losses[max(0, end - SMOOTHING):end]) for end in range(1, len(losses) + 1)])
