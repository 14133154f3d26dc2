"""What a run folder says of a run: its curves over steps, time, tokens and FLOPs, and its configuration."""

import dataclasses
import pathlib
import statistics
from typing import Any

import numpy as np

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import fairness
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal
from switch_tf.reporting import figures, report
from switch_tf.storage import json_lines

# Fields of a run's record that are read here, each with a check of its value.
_NEEDED = {
    "MIXTURE_OR_TASK_NAME": lambda found: isinstance(found, str),
    "optimizer": lambda found: isinstance(found, str),
    "SEED": json_lines.is_step,
    "BATCH_SIZE": lambda found: json_lines.is_step(found) and 0 < found < 2**31,
    "TASK_FEATURE_LENGTHS": lambda found: isinstance(found, dict) and {"inputs", "targets"} <= found.keys() and all(
        json_lines.is_step(length) and length < 2**31 for length in found.values()),
}
# Evaluations whose mean is a smoothed loss: one alone depends on which batch was the last.
SMOOTHING = 3


@dataclasses.dataclass(frozen=True)
class Curves:
    """The evaluations of one run.

    `name`: of the variant; `seed`: int; `folder`: of the run; `record`: its configuration, `continuation.record`;
    `config`: SwitchConfig; `steps`: of evaluations, without the one before the first step; `losses`: of the whole
    mixture, smoothed; `values`: name of whatever else evaluations write -> (steps, values), as it was written;
    `seconds`, `tokens`: since the start at each of `steps`, of training alone; `step_times`: logged step -> seconds of
    a step before it.
    """

    name: str
    seed: int
    folder: pathlib.Path
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
        """What the loss is called in metrics.jsonl."""
        return f"eval/{self.record['MIXTURE_OR_TASK_NAME']}/loss"

    @property
    def flops(self) -> np.ndarray:
        """Spent at each of `steps`: products with weights, forward and twice that backward."""
        lengths = self.record["TASK_FEATURE_LENGTHS"]
        targets = 0 if self.config.is_encoder_only else lengths["targets"]
        return 3.0 * self.steps * self.record["BATCH_SIZE"] * self.config.flops_per_sequence(lengths["inputs"], targets)


def read(folder, name: str) -> Curves:
    """Reads a run folder, finished or not.

    Raises:
        Refusal: it is none, has no checkpoint yet, no evaluation with a loss, or one whose loss is no number.
    """
    folder = pathlib.Path(folder)
    record = _record(folder)
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
    return Curves(name, record["SEED"], folder, record, fairness.config_of(record), np.array(steps), smoothed(losses),
                  {key: figures.series(records, key) for key in sorted(names) if not key.endswith("/unigram_loss")},
                  np.interp(steps, *seconds), np.interp(steps, *tokens), times)


def of_tasks(run: Curves) -> dict[str, Curves]:
    """The same run by the loss of each task of its mixture, where those were evaluated by themselves."""
    found = {}
    for name, (steps, values) in run.values.items():
        losses = [value for step, value in zip(steps, values, strict=True) if step > 0]
        if name.endswith("/loss") and len(losses) == len(run.steps):
            found[name.split("/")[1]] = dataclasses.replace(run, losses=smoothed(losses))
    return found


def told_apart(runs: list[Curves]) -> list[Curves]:
    """The same with the path as name where runs of one name differ in more than their seed."""
    def others(run):
        return [other for other in runs if other.name == run.name]

    return [run if all(fairness.without_seed(other.record) == fairness.without_seed(run.record) and
                       (other is run or other.seed != run.seed) for other in others(run))
            else dataclasses.replace(run, name=str(run.folder)) for run in runs]


def smoothed(losses) -> np.ndarray:
    """Returns each loss averaged with the two before it; the first two have fewer to average.

    Means are exact before they are rounded, so equal losses give equal means whatever came before them, and a tie
    between two runs stays a tie.
    """
    losses = [float(loss) for loss in losses]
    return np.array([statistics.mean(losses[max(0, end - SMOOTHING):end]) for end in range(1, len(losses) + 1)])


def _record(folder):
    checkpoints = RunFolder.checkpoints_of(folder)
    for path in folders.newest_first(checkpoints):
        try:
            record = folders.describe(path).get("configuration")
        except folders.BrokenCheckpoint:
            continue
        if not record:
            raise Refusal(f"{path} is of a version that kept no record of the configuration; only runs of this one "
                          "can be compared.")
        _check_record(record, path)
        return record
    raise Refusal(f"{str(folder)!r} is no run folder with a checkpoint; a run is compared after it was trained.")


def _check_record(record, path):
    """Refuses a record that lacks what a comparison needs, or holds something else in its place."""
    try:
        fairness.config_of(record)
        for name, is_right in _NEEDED.items():
            if not is_right(record.get(name)):
                raise ValueError(f"{name} is missing or damaged")
    except (ValueError, TypeError) as error:
        raise Refusal(f"The configuration in {path / 'checkpoint.json'} cannot be read: {first_line(error)}. Leave "
                      "the run out of the comparison, or copy its folder again.") from error


def _times(records):
    """Seconds of a step by logged step, and (steps, sums) of seconds and tokens, which evaluations are no part of."""
    names = ("train/seconds_per_step", "train/tokens_per_second")
    timed = [record for record in records if all(record.get(name) is not None for name in names)]
    (steps, per_step), (_, per_second) = (figures.series(timed, name) for name in names)
    lengths = np.diff([0, *steps])
    seconds = np.cumsum(lengths * np.array(per_step))
    tokens = np.cumsum(lengths * np.array(per_step) * np.array(per_second))
    at = [0, *steps]
    return dict(zip(steps, per_step, strict=True)), (at, [0.0, *seconds]), (at, [0.0, *tokens])
