"""Results of a comparison: the speed-up of each variant to the baseline's quality, and its cost."""

import numpy as np
from etils import epy

from switch_tf.comparison import distilled, fairness
from switch_tf.comparison.curves import SMOOTHING, Curves, of_tasks

with epy.lazy_imports():  # takes a second
    from scipy import stats

_ERROR_RATE = 0.05  # of all tests of a comparison together
# Shares of the baseline's run after which its loss is a target for the others.
_SHARES = (0.25, 0.5, 0.75, 1.0)


def compare(curves: list[Curves]) -> dict:
    """Returns the results of a comparison, JSON-able.

    The target is the smoothed last loss of the baseline, the mean of its last evaluations. A variant reaches it
    at the first evaluation with a smoothed loss that is not above it, so speed-ups are no finer than the evaluation
    period. Each seed is compared with the same seed of the baseline, or with its first seed if that is missing.
    Speed-ups are medians over seeds; a seed that does not reach the target counts as the slowest.

    Args:
        curves: list of at least two runs. Runs of a variant have the same name.

    Returns:
        dict of `baseline`, `target_loss`, `work` (a sentence), `not_equal` (sentences, the most important first) and
        `variants`, in the order of `curves`.

    Raises:
        Refusal: losses of the runs are not of the same tokens.
    """
    of_names = by_name(curves)
    fairness.check_losses({str(run.folder): run.record for run in curves})
    records = {name: runs[0].record for name, runs in of_names.items()}
    baseline = fairness.baseline({name: runs[0].config for name, runs in of_names.items()})
    shares = fairness.work_over_baseline(records)
    tests = _tests({name: pairs(runs, of_names[baseline]) for name, runs in of_names.items() if name != baseline})
    return {
        "baseline": baseline,
        "target_loss": _median([run.losses[-1] for run in of_names[baseline]]),
        "loss": curves[0].loss_name,
        "smoothing": _smoothing(curves),
        "evaluation_period": int(np.min(np.diff(curves[0].steps, prepend=0))),
        "work": fairness.sentence_about_work(shares, baseline),
        "not_equal": [*fairness.remarks(records), *_other_ends(of_names, baseline)],
        "variants": [{**_variant(name, runs, of_names[baseline]), **tests.get(name, _NO_TEST),
                      "work_over_baseline": shares[name],
                      "distilled": distilled.share_of_gain(pairs(runs, of_names[baseline]), curves)}
                     for name, runs in of_names.items()],
    }


def _other_ends(of_names, baseline):
    """Returns a sentence for each run that ends at another step than the baseline of its seed."""
    return [f"{reference.name} was last evaluated at step {reference.steps[-1]} and {run.name}, seed {run.seed}, at "
            f"step {run.steps[-1]}." for runs in of_names.values() for run, reference in pairs(runs, of_names[baseline])
            if run.steps[-1] != reference.steps[-1]]


def by_name(curves: list[Curves]) -> dict[str, list[Curves]]:
    """Returns name of a variant -> its runs, in the order of `curves`."""
    runs: dict[str, list[Curves]] = {}
    for run in curves:
        runs.setdefault(run.name, []).append(run)
    return runs


def speedup(run: Curves, reference: Curves, index: int) -> tuple[float | None, float | None]:
    """Returns the speed-up of a run, in steps and in time, to the loss of another one at evaluation `index`.

    It is below 1 if the run is later, and None if it does not reach the loss.
    """
    reached = np.flatnonzero(run.losses <= reference.losses[index])
    first = np.flatnonzero(reference.losses <= reference.losses[index])[0]
    if not len(reached):
        return None, None
    at = reached[0]
    return float(reference.steps[first] / run.steps[at]), float(reference.seconds[first] / run.seconds[at])


def pairs(runs: list[Curves], references: list[Curves]) -> list[tuple[Curves, Curves]]:
    """Returns each run with the reference of its seed, or with the first one."""
    of_seed = {reference.seed: reference for reference in references}
    return [(run, of_seed.get(run.seed, references[0])) for run in runs]


def _variant(name, runs, references):
    config, record = runs[0].config, runs[0].record
    work = fairness.work(config, record["TASK_FEATURE_LENGTHS"])
    paired = pairs(runs, references)
    ratio = _time_ratio(paired)
    seeds = [_seed(run, reference) for run, reference in paired]
    targets = [target(paired, share) for share in _SHARES]
    return {
        "name": name,
        "num_experts": config.num_experts,
        "num_parameters": config.num_parameters,
        "flops_per_token": work.flops_per_token,
        "router_flops_share": work.router_flops_share,
        "capacity_padding_share": work.capacity_padding_share,
        "seconds_per_step": ratio * _median([time for run in references for time in run.step_times.values()]),
        "step_time_over_dense": ratio,
        "final_loss": _median([run.losses[-1] for run in runs]),
        "loss_over_baseline": float(np.mean([seed["loss_over_baseline"] for seed in seeds])),
        "speedup_steps": targets[-1]["speedup_steps"],
        "speedup_time": targets[-1]["speedup_time"],
        "targets": targets,
        "tasks": _tasks(paired),
        "seeds": seeds,
    }


# Without several seeds of variant and baseline: differences to a single run of the baseline hide its own chance.
_NO_TEST = {"p_value": None, "smallest_effect": None}


def _tests(paired):
    """Returns name of a variant -> `p_value` and `smallest_effect`, corrected for the number of variants.

    Seeds share their batches with the baseline, so the mean of their differences is tested against 0 by Student's t. A
    table of several variants makes as many tests. By Holm's method the chance that any of them finds a difference where
    there is none stays at 5 %: the smallest of m p-values is multiplied by m, the next one by m - 1. `smallest_effect`
    is the mean that would be significant at the place of the variant in that order.

    Args:
        paired: Name of each variant, without the baseline -> its `pairs`.
    """
    differences = {name: np.array([run.losses[-1] - reference.losses[-1] for run, reference in runs])
                   for name, runs in paired.items()
                   if len(runs) > 1 and all(run.seed == reference.seed for run, reference in runs)}
    p_values, errors = {}, {}
    for name, values in differences.items():
        errors[name] = np.std(values, ddof=1) / np.sqrt(len(values))
        t = abs(np.mean(values)) / errors[name] if errors[name] else np.inf if np.mean(values) else 0.0
        p_values[name] = 2 * stats.t.sf(t, len(values) - 1)
    tests, largest = {}, 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        factor = len(p_values) - place
        largest = max(largest, min(1.0, factor * p_values[name]))
        degrees = len(differences[name]) - 1
        tests[name] = {"p_value": float(largest), "smallest_effect": float(
            stats.t.ppf(1 - _ERROR_RATE / 2 / factor, degrees) * errors[name])}
    return tests


def _smoothing(curves):
    """Returns how many evaluations the last losses are means of."""
    counts = sorted({min(SMOOTHING, len(run.losses)) for run in curves})
    if counts == [1]:
        return "one evaluation"
    return f"mean of the last {' or '.join(map(str, counts))} evaluations"


def _seed(run, reference):
    in_steps, in_time = speedup(run, reference, -1)
    return {
        "seed": run.seed, "run": str(run.folder), "final_loss": float(run.losses[-1]),
        "loss_over_baseline": float(run.losses[-1] - reference.losses[-1]), "speedup_steps": in_steps,
        "speedup_time": in_time,
        "curves": {"steps": run.steps.tolist(), "seconds": run.seconds.tolist(), "tokens": run.tokens.tolist(),
                   "flops": run.flops.tolist(), "loss": run.losses.tolist()},
        "values": {name: {"steps": steps, "values": values} for name, (steps, values) in run.values.items()},
    }  # fmt: skip


def _tasks(paired):
    """Returns task -> final loss and speed-ups to the baseline's final loss (Figures 7 and 8 of the paper)."""
    of_pairs = [(of_tasks(run), of_tasks(reference)) for run, reference in paired]
    names = [name for name in of_pairs[0][0] if all(name in tasks for pair in of_pairs for tasks in pair)]
    results = {}
    for name in names:
        sooner = [speedup(runs[name], references[name], -1) for runs, references in of_pairs]
        results[name] = {"final_loss": _median([runs[name].losses[-1] for runs, _ in of_pairs]),
                         "speedup_steps": _median_speedup([steps for steps, _ in sooner]),
                         "speedup_time": _median_speedup([time for _, time in sooner])}
    return results


def target(paired: list[tuple[Curves, Curves]], share: float) -> dict:
    """Returns the speed-ups of runs to the losses of their references after a share of the evaluations.

    Args:
        paired: Pairs of `pairs`.
        share: float in (0, 1].

    Returns:
        dict of `share_of_baseline`, `loss`, `speedup_steps`, `speedup_time`. Speed-ups are medians, or None if the loss
        is not reached.
    """
    speedups, losses = [], []
    for run, reference in paired:
        index = max(0, round(share * len(reference.steps)) - 1)
        losses.append(reference.losses[index])
        speedups.append(speedup(run, reference, index))
    return {"share_of_baseline": share, "loss": _median(losses),
            "speedup_steps": _median_speedup([steps for steps, _ in speedups]),
            "speedup_time": _median_speedup([time for _, time in speedups])}


def _time_ratio(paired):
    """Returns the median ratio of step times logged at the same step, which runs in turns took in the same minutes."""
    ratios = [run.step_times[step] / reference.step_times[step] for run, reference in paired
              for step in run.step_times.keys() & reference.step_times.keys()]
    if ratios:
        return _median(ratios)
    return _median([_median([*run.step_times.values()]) / _median([*reference.step_times.values()])
                    for run, reference in paired])


def _median(values):
    return float(np.median(values))


def _median_speedup(values):
    """Returns the median, the lower one of two, so that a seed without a speed-up counts."""
    ordered = sorted(values, key=lambda value: value or 0.0)
    return ordered[(len(ordered) - 1) // 2]
