"""Results of a comparison: the speed-up of each variant to the baseline's quality, and its cost."""

import numpy as np

from switch_tf.comparison import fairness
from switch_tf.comparison.curves import SMOOTHING, Curves, of_tasks

# Points of the baseline's run whose loss the others have to reach.
_SHARES = (0.25, 0.5, 0.75, 1.0)


def compare(curves: list[Curves]) -> dict:
    """The JSON object of a comparison.

    The target is the baseline's last loss, smoothed: the mean of its last three evaluations. A variant has reached it
    at the first evaluation whose own such mean is not above it, so a speed-up is no finer than the time between two
    evaluations. Of several seeds each is compared with the baseline's of the same seed (the baseline's first, where it
    lacks that one), and the median is told; a seed that does not get there counts as slower than all that do.

    Args:
        curves: runs, at least two, those of one variant by the same name.

    Returns:
        dict of `baseline`, `target_loss`, `work` (a sentence), `not_equal` (sentences, the most important first) and
        `variants`, in the order of `curves`.

    Raises:
        Refusal: their losses are not of the same tokens.
    """
    of_names = by_name(curves)
    fairness.check_losses({str(run.folder): run.record for run in curves})
    records = {name: runs[0].record for name, runs in of_names.items()}
    baseline = fairness.baseline({name: runs[0].config for name, runs in of_names.items()})
    shares = fairness.work_over_baseline(records)
    return {
        "baseline": baseline,
        "target_loss": _median([run.losses[-1] for run in of_names[baseline]]),
        "loss": curves[0].loss_name,
        "smoothing": f"mean of {SMOOTHING} evaluations",
        "evaluation_period": int(np.min(np.diff(curves[0].steps, prepend=0))),
        "work": fairness.sentence_about_work(shares, baseline),
        "not_equal": [*fairness.remarks(records), *_other_ends(of_names, baseline)],
        "variants": [{**_variant(name, runs, of_names[baseline]), "work_over_baseline": shares[name]}
                     for name, runs in of_names.items()],
    }


def _other_ends(of_names, baseline):
    """In sentences, which runs went on for longer than the baseline's of their seed, or not as long."""
    return [f"{reference.name} was last evaluated at step {reference.steps[-1]} and {run.name}, seed {run.seed}, at "
            f"step {run.steps[-1]}." for runs in of_names.values() for run, reference in pairs(runs, of_names[baseline])
            if run.steps[-1] != reference.steps[-1]]


def by_name(curves: list[Curves]) -> dict[str, list[Curves]]:
    """Name of a variant -> its runs, in the order in which they come."""
    found: dict[str, list[Curves]] = {}
    for run in curves:
        found.setdefault(run.name, []).append(run)
    return found


def speedup(run: Curves, reference: Curves, index: int) -> tuple[float | None, float | None]:
    """Speed-up of a run, in steps and in time, to the loss that another one has at evaluation `index`.

    Below 1 where it gets there later, None where it does not get there.
    """
    reached = np.flatnonzero(run.losses <= reference.losses[index])
    first = np.flatnonzero(reference.losses <= reference.losses[index])[0]
    if not len(reached):
        return None, None
    at = reached[0]
    return float(reference.steps[first] / run.steps[at]), float(reference.seconds[first] / run.seconds[at])


def pairs(runs: list[Curves], references: list[Curves]) -> list[tuple[Curves, Curves]]:
    """Each run with the reference of its seed, or the first one."""
    of_seed = {reference.seed: reference for reference in references}
    return [(run, of_seed.get(run.seed, references[0])) for run in runs]


def _variant(name, runs, references):
    config, record = runs[0].config, runs[0].record
    work = fairness.work(config, record["TASK_FEATURE_LENGTHS"])
    times = [time for run in runs for time in run.step_times.values()]
    paired = pairs(runs, references)
    seeds = [_seed(run, reference) for run, reference in paired]
    targets = [target(paired, share) for share in _SHARES]
    return {
        "name": name,
        "num_experts": config.num_experts,
        "num_parameters": config.num_parameters,
        "flops_per_token": work.flops_per_token,
        "router_flops_share": work.router_flops_share,
        "capacity_padding_share": work.capacity_padding_share,
        "seconds_per_step": _median(times),
        "step_time_over_dense": _time_ratio(paired),
        "final_loss": _median([run.losses[-1] for run in runs]),
        **_over_baseline(seeds, all(run.seed == reference.seed for run, reference in paired)),
        "speedup_steps": targets[-1]["speedup_steps"],
        "speedup_time": targets[-1]["speedup_time"],
        "targets": targets,
        "tasks": _tasks(paired),
        "seeds": seeds,
    }


def _over_baseline(seeds, are_of_same_seeds):
    """`loss_over_baseline`, the mean over seeds, and `smallest_effect`, None without several seeds of both.

    Seeds share their batches with the baseline's, so what is asked is whether the mean of their differences is other
    than 0: with 95 % certainty it is where it lies beyond `smallest_effect`, Student's t times its standard error.
    Differences from one and the same run of the baseline would hide how much that one owes to chance.
    """
    from scipy import stats

    differences = [seed["loss_over_baseline"] for seed in seeds]
    count = len(differences)
    smallest = None
    if count > 1 and are_of_same_seeds:
        smallest = float(stats.t.ppf(0.975, count - 1) * np.std(differences, ddof=1) / np.sqrt(count))
    return {"loss_over_baseline": float(np.mean(differences)), "smallest_effect": smallest}


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
    """Task -> final loss and speed-ups to the reference's own final loss of that task (the paper's Figures 7 and 8)."""
    of_pairs = [(of_tasks(run), of_tasks(reference)) for run, reference in paired]
    names = [name for name in of_pairs[0][0] if all(name in of for pair in of_pairs for of in pair)]
    found = {}
    for name in names:
        sooner = [speedup(runs[name], references[name], -1) for runs, references in of_pairs]
        found[name] = {"final_loss": _median([runs[name].losses[-1] for runs, _ in of_pairs]),
                       "speedup_steps": _median_speedup([steps for steps, _ in sooner]),
                       "speedup_time": _median_speedup([time for _, time in sooner])}
    return found


def target(paired: list[tuple[Curves, Curves]], share: float) -> dict:
    """Speed-ups of runs to the loss that the references of their seeds had after a share of their evaluations.

    Args:
        paired: from `pairs`.
        share: float above 0, up to 1.

    Returns:
        dict of `share_of_baseline`, `loss`, `speedup_steps`, `speedup_time`: medians, None where it is not reached.
    """
    found, losses = [], []
    for run, reference in paired:
        index = max(0, round(share * len(reference.steps)) - 1)
        losses.append(reference.losses[index])
        found.append(speedup(run, reference, index))
    return {"share_of_baseline": share, "loss": _median(losses),
            "speedup_steps": _median_speedup([steps for steps, _ in found]),
            "speedup_time": _median_speedup([time for _, time in found])}


def _time_ratio(paired):
    """Median of the ratios of step times logged at the same step: of the same minutes where runs took turns."""
    ratios = [run.step_times[step] / reference.step_times[step] for run, reference in paired
              for step in run.step_times.keys() & reference.step_times.keys()]
    if ratios:
        return _median(ratios)
    return _median([_median([*run.step_times.values()]) / _median([*reference.step_times.values()])
                    for run, reference in paired])


def _median(values):
    return float(np.median(values))


def _median_speedup(values):
    """The lower of the two in the middle where they are even, so that a seed that does not get there is heard."""
    ordered = sorted(values, key=lambda value: value or 0.0)
    return ordered[(len(ordered) - 1) // 2]
