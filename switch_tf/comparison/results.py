"""Reads the curves of runs, and compares costs and speed-ups to equal loss."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import continuation, folders
from switch_tf.comparison import fairness
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal, first_line
from switch_tf.reporting import report

with epy.lazy_imports():  # takes a second
    from scipy import stats

# Required fields of a run's record, with a check.
_NEEDED = (("MIXTURE_OR_TASK_NAME", checks.text), ("optimizer", checks.text), ("SEED", checks.integer, 0),
           ("BATCH_SIZE", checks.integer, 1), ("TASK_FEATURE_LENGTHS", checks.lengths))
# May differ between the seeds of a variant.
_OF_A_SEED = ("SEED", "INITIAL_CHECKPOINT", "Distillation.teacher")
# Evaluations to average, because a loss depends on the last batch.
SMOOTHING = 3
_ERROR_RATE = 0.05  # of all tests together
# Shares of the baseline's run, for target losses.
_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The evaluations of a run.

    `name`: Variant.
    `checkpoint`: `folders.identity` of the newest checkpoint.
    `record`: From `continuation.record`.
    `loss_name`: Name in metrics.jsonl of the mixture's loss.
    `steps`: Steps of evaluations after the start.
    `losses`: Smoothed losses of the mixture.
    `values`: Name of any other evaluated value -> (steps, values), not smoothed.
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
    loss_name: str
    steps: np.ndarray
    losses: np.ndarray
    values: dict[str, tuple[list[int], list[float]]]
    seconds: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    step_times: dict[int, float]


Pairs = list[tuple[Curves, Curves]]  # (run of a variant, baseline's run)


def read(folder: pathlib.Path, name: str) -> Curves:
    """Reads a run folder. Refuses one without a checkpoint, loss or logged speed, and a loss that is not finite."""
    path, description = next(folders.described(folders.checkpoints_of(folder)), (None, {}))
    if not path:
        raise Refusal(f"{str(folder)!r} is no run folder with a checkpoint; a run is compared after it was trained.")
    if not (record := description["configuration"]):
        raise Refusal(f"{path} is of a version that kept no record of the configuration; only runs of this one "
                      "can be compared.")
    try:
        config = SwitchConfig(**continuation.model_fields(record))
        for field, check, *rule in _NEEDED:
            try:
                check(field, record.get(field), *rule)
            except Refusal:
                raise ValueError(f"{field} is missing or damaged") from None
    except (ValueError, TypeError) as error:
        raise Refusal(f"The configuration in {path / 'checkpoint.json'} cannot be read: {first_line(error)}. Leave "
                      "the run out of the comparison, or copy its folder again.") from error
    records = report.read_metrics(folder)
    loss_name = f"eval/{record['MIXTURE_OR_TASK_NAME']}/loss"
    after_start = [entry for entry in records if entry["step"] > 0]
    steps, losses = map(np.array, report.series(after_start, loss_name))
    diverged = [entry["step"] for entry in after_start if entry.get(loss_name, 0.0) is None]
    if diverged:
        raise Refusal(f"The run {str(folder)!r} diverged: its held-out loss at step {diverged[0]} is no number. "
                      "Leave it out of the comparison, or train it anew.")
    if not len(steps):
        raise Refusal(f"The run {str(folder)!r} has no held-out loss after its start ({loss_name} in "
                      "metrics.jsonl); train it with an EVAL_PERIOD above 0.")
    timed = [[entry.get(key) for key in ("step", "train/seconds_per_step", "train/tokens_per_second")]
             for entry in records]
    logged, per_step, per_second = np.array([row for row in timed if None not in row], float).reshape(-1, 3).T
    if not len(logged):
        raise Refusal(f"The run {str(folder)!r} has no logged speed (train/seconds_per_step in metrics.jsonl), so its "
                      "training time is unknown; train it to its next LOG_PERIOD.")
    seconds = np.diff(logged, prepend=0) * per_step  # without evaluations
    seconds, tokens = (np.interp(steps, [0, *logged], [0, *np.cumsum(values)])
                       for values in (seconds, seconds * per_second))
    lengths = record["TASK_FEATURE_LENGTHS"]
    flops = config.flops_per_sequence(lengths["inputs"], 0 if config.is_encoder_only else lengths["targets"])
    return Curves(name, record["SEED"], folder, folders.identity(description), record, config, loss_name, steps,
                  smoothed(losses),
                  {key: points for key, points in report.evaluations(records).items()
                   if key != loss_name and not key.endswith("/unigram_loss")},
                  seconds, tokens, 3.0 * steps * record["BATCH_SIZE"] * flops,
                  dict(zip(logged, per_step, strict=True)))


def _split_by_task(run):
    """Returns task -> run, with the task's losses instead of the mixture's."""
    runs = {}
    for name, (steps, values) in run.values.items():
        losses = [value for step, value in zip(steps, values, strict=True) if step > 0]
        if name.endswith("/loss") and len(losses) == len(run.steps):
            runs[name.split("/")[1]] = dataclasses.replace(run, losses=smoothed(losses))
    return runs


def told_apart(runs: list[Curves]) -> list[Curves]:
    """Names runs by path if they share a name but differ in more than the seed."""
    def differ(run, other):
        return other.name == run.name and other is not run and (other.seed == run.seed or any(
            other.record.get(name) != run.record.get(name) for name in other.record | run.record
            if name not in _OF_A_SEED))

    return [dataclasses.replace(run, name=str(run.folder)) if any(differ(run, other) for other in runs) else run
            for run in runs]


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Returns the mean of each loss and up to two losses before it.

    Means are rounded only once, so a tie between two runs stays a tie.
    """
    losses = [float(loss) for loss in losses]
    return np.array([statistics.mean(losses[max(0, end - SMOOTHING):end]) for end in range(1, len(losses) + 1)])


def compare(curves: list[Curves]) -> dict:
    """Returns the results of a comparison, JSON-able.

    The target is the baseline's smoothed last loss. A variant reaches it at its first evaluation with a smoothed loss
    at or below it. Speed-ups are medians over seeds; a seed that does not reach the target counts as the slowest.

    Args:
        curves: At least two runs. Runs of a variant have the same name.

    Returns:
        `baseline`, `target_loss`, `loss`, `smoothing`, `evaluation_period`, `work` (a sentence), `not_equal`
        (sentences, the most important first) and `variants`, in the order of `curves`.
    """
    of_names = group_by_name(curves)
    fairness.check_losses({str(run.folder): run.record for run in curves})
    records = {name: runs[0].record for name, runs in of_names.items()}
    configs = {name: runs[0].config for name, runs in of_names.items()}
    baseline, _, shares = fairness.work_without_router(configs, curves[0].record["TASK_FEATURE_LENGTHS"])
    references = of_names[baseline]
    paired = {name: pairs(runs, references) for name, runs in of_names.items()}
    tests = _tests(paired)
    step_time = _median([time for run in references for time in run.step_times.values()])
    counts = sorted({min(SMOOTHING, len(run.losses)) for run in curves})
    return {
        "baseline": baseline,
        "target_loss": _median([run.losses[-1] for run in references]),
        "loss": curves[0].loss_name,
        "smoothing": "one evaluation" if counts == [1] else
                     f"mean of the last {' or '.join(map(str, counts))} evaluations",
        "evaluation_period": int(np.min(np.diff(curves[0].steps, prepend=0))),
        "work": fairness.sentence_about_work(shares, baseline),
        "not_equal": [*fairness.remarks(records, shares, baseline), *(
            f"{reference.name} was last evaluated at step {reference.steps[-1]} and {run.name}, seed {run.seed}, at "
            f"step {run.steps[-1]}." for runs in paired.values() for run, reference in runs
            if run.steps[-1] != reference.steps[-1])],
        "variants": [{"name": name, **_variant(runs, step_time),
                      **tests[name],
                      "work_over_baseline": shares[name],
                      "distilled": _share_of_gain(runs, curves)} for name, runs in paired.items()],
    }


def group_by_name(curves: list[Curves]) -> dict[str, list[Curves]]:
    """Returns name of a variant -> its runs."""
    return {run.name: [other for other in curves if other.name == run.name] for run in curves}


def pairs(runs: list[Curves], references: list[Curves]) -> Pairs:
    """Returns each run with the reference of its seed, else the first one."""
    of_seed = {reference.seed: reference for reference in references}
    return [(run, of_seed.get(run.seed, references[0])) for run in runs]


def target(paired: Pairs, share: float) -> dict:
    """Returns the speed-ups of runs to their references' losses after a share, in (0, 1], of the evaluations.

    Speed-ups are medians, None if the median run does not reach the loss.
    """
    losses, speedups = [], []
    for run, reference in paired:
        losses.append(reference.losses[max(0, round(share * len(reference.steps)) - 1)])
        at, first = (np.flatnonzero(one.losses <= losses[-1])[:1] for one in (run, reference))
        speedups.append([float(getattr(reference, along)[first][0] / getattr(run, along)[at][0]) if len(at) else None
                         for along in ("steps", "seconds")])
    # The lower median counts a seed without a speed-up.
    in_steps, in_time = (sorted(values, key=lambda value: value or 0.0)[(len(paired) - 1) // 2]
                         for values in zip(*speedups, strict=True))
    return {"share_of_baseline": share, "loss": _median(losses), "speedup_steps": in_steps, "speedup_time": in_time}


def _final_speedups(paired):
    return {name: value for name, value in target(paired, 1.0).items() if name.startswith("speedup")}


def _variant(paired, step_time):
    """Returns a variant's cost and quality. `step_time` is the baseline's."""
    runs = [run for run, _ in paired]
    config = runs[0].config
    # Runs in turns trained the same step in the same minutes.
    ratios = [run.step_times[step] / reference.step_times[step] for run, reference in paired
              for step in run.step_times.keys() & reference.step_times.keys()]
    ratio = _median(ratios or [_median([*run.step_times.values()]) / _median([*reference.step_times.values()])
                               for run, reference in paired])
    seeds = [{
        "seed": run.seed, "run": str(run.folder), "final_loss": float(run.losses[-1]),
        "loss_over_baseline": float(run.losses[-1] - reference.losses[-1]), **_final_speedups([(run, reference)]),
        "curves": {name.replace("losses", "loss"): getattr(run, name).tolist()
                   for name in ("steps", "seconds", "tokens", "flops", "losses")},
        "values": {name: {"steps": steps, "values": values} for name, (steps, values) in run.values.items()},
    } for run, reference in paired]
    # Figures 7 and 8 of the paper.
    of_pairs = [(_split_by_task(run), _split_by_task(reference)) for run, reference in paired]
    tasks = {name: {"final_loss": _median([own[name].losses[-1] for own, _ in of_pairs]),
                    **_final_speedups([(own[name], other[name]) for own, other in of_pairs])}
             for name in of_pairs[0][0] if all(name in curves for pair in of_pairs for curves in pair)}
    return {
        "num_experts": config.num_experts,
        "num_parameters": config.num_parameters,
        **fairness.work(config, runs[0].record["TASK_FEATURE_LENGTHS"]),
        "seconds_per_step": ratio * step_time,
        "step_time_over_dense": ratio,
        "final_loss": _median([run.losses[-1] for run in runs]),
        "loss_over_baseline": float(np.mean([seed["loss_over_baseline"] for seed in seeds])),
        **_final_speedups(paired),
        "targets": [target(paired, share) for share in _SHARES],
        "tasks": tasks,
        "seeds": seeds,
    }


def _tests(paired):
    """Returns name of a variant -> `p_value` and `smallest_effect` or None, corrected for the number of variants.

    Seeds share their batches with the baseline, so Student's t tests the mean of their differences against 0. Holm's
    method keeps the chance of any false difference at 5 %: the smallest of m p-values is multiplied by m, the next one
    by m - 1. `smallest_effect` is the mean that would be significant at the variant's place in that order. A variant is
    tested only if it has several seeds and the baseline has all of them: a single baseline run would hide its own
    chance.
    """
    differences = {name: np.array([run.losses[-1] - reference.losses[-1] for run, reference in runs])
                   for name, runs in paired.items()
                   if len(runs) > 1 and all(run.seed == reference.seed and run is not reference
                                            for run, reference in runs)}
    p_values, errors = {}, {}
    for name, values in differences.items():
        errors[name] = stats.sem(values)
        t = abs(np.mean(values)) / errors[name] if errors[name] else np.inf if np.mean(values) else 0.0
        p_values[name] = 2 * stats.t.sf(t, len(values) - 1)
    tests, largest = {name: {"p_value": None, "smallest_effect": None} for name in paired}, 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        factor = len(p_values) - place
        largest = max(largest, min(1.0, factor * p_values[name]))
        degrees = len(differences[name]) - 1
        tests[name] = {"p_value": float(largest), "smallest_effect": float(
            stats.t.ppf(1 - _ERROR_RATE / 2 / factor, degrees) * errors[name])}
    return tests


def _share_of_gain(paired, curves):
    """Returns the share of its teachers' gain that a distilled variant keeps, or None without the teachers' runs.

    As in Tables 6 to 8 of the paper, `share` is the variant's mean gain over the baseline divided by the teacher's, or
    None if the teacher has none. `compression` is the share of the teacher's parameters that the student lacks.
    """
    by_checkpoint = {run.checkpoint: run for run in curves}
    teachers = [by_checkpoint.get(run.record.get("Distillation.teacher")) for run, _ in paired]
    if not all(teachers) or len({teacher.name for teacher in teachers}) > 1:
        return None
    gains = [[float(reference.losses[-1] - run.losses[-1]), float(reference.losses[-1] - teacher.losses[-1])]
             for (run, reference), teacher in zip(paired, teachers, strict=True)]
    share, *shares = (gain / whole if whole > 0 else None for gain, whole in (
        [float(np.mean(column)) for column in zip(*gains, strict=True)], *gains))
    return {"teacher": teachers[0].name, "share": share, "shares": shares,
            "compression": 1 - paired[0][0].config.num_parameters / teachers[0].config.num_parameters}


def _median(values):
    return float(np.median(values))
