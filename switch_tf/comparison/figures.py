"""Draws a comparison: held-out loss over steps, time, FLOPs and tokens, and speed-ups to equal loss."""

import numpy as np

from switch_tf.comparison.curves import Curves
from switch_tf.comparison.results import by_name, pairs, target
from switch_tf.reporting.figures import png, pyplot

# Speed-ups start at this share of the baseline's run, because models have hardly learnt before.
_FROM = 0.2


def draw(curves: list[Curves], outcome: dict) -> bytes:
    """Returns a PNG. Of several seeds the median is a line and the range a band.

    Args:
        curves: Runs of all variants.
        outcome: Results of `results.compare`.
    """
    of_names = by_name(curves)
    colors = dict(zip(of_names, pyplot().get_cmap("viridis")(np.linspace(0, 0.85, len(of_names))), strict=True))
    colors[outcome["baseline"]] = "tab:red"
    others = _other_metrics(of_names)
    has_tasks = any(variant["tasks"] for variant in outcome["variants"])
    panels = 5 + len(others) + has_tasks
    rows = -(-panels // 3)
    figure, grid = pyplot().subplots(rows, 3, figsize=(15, 4.2 * rows), squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for panel, (unit, of_run) in zip(axes, _axes(of_names).items(), strict=False):
        _losses(panel, of_names, colors, outcome, unit, of_run)
    _speedups(axes[4], of_names, colors, outcome["baseline"])
    for panel, name in zip(axes[5:], others, strict=False):
        _metric(panel, of_names, colors, name)
    if has_tasks:
        _tasks(axes[panels - 1], outcome, colors)
    for panel in axes[panels:]:
        panel.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(of_names) + 1))
    return png(figure)


def _axes(of_names):
    """Returns title of a horizontal axis -> function of a run to its values there."""
    runs = [run for runs in of_names.values() for run in runs]
    longest = max(run.seconds[-1] for run in runs)
    unit, size = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    return {"steps": lambda run: run.steps, f"{unit} of training": lambda run: run.seconds / size,
            "FLOPs (matrix products with weights)": lambda run: run.flops, "tokens": lambda run: run.tokens}


def _losses(axes, of_names, colors, outcome, unit, of_run):
    for name, runs in of_names.items():
        along, losses = _band(axes, [of_run(run) for run in runs], [run.losses for run in runs], colors[name], name)
        at = np.flatnonzero(losses <= outcome["target_loss"])
        if len(at):
            axes.plot(along[at[0]], losses[at[0]], "o", color=colors[name])
    axes.axhline(outcome["target_loss"], color="grey", linestyle="--", linewidth=1, label="target loss")
    axes.set(xlabel=unit, ylabel="held-out loss (nats per token)", title=f"Loss over {unit}")
    axes.grid(alpha=0.3)


def _band(axes, along, values, color, name=None):
    """Draws the median of seeds, and their range if they are several. Returns the points of the line."""
    shortest = min(map(len, values))
    along = np.median([entry[:shortest] for entry in along], axis=0)
    values = np.array([entry[:shortest] for entry in values])
    line = np.median(values, axis=0)
    axes.plot(along, line, color=color, label=name)
    if len(values) > 1:
        axes.fill_between(along, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    return along, line


def _speedups(axes, of_names, colors, baseline):
    """Draws median speed-ups to the losses of the baseline, in steps (solid) and in time (dashed)."""
    evaluations = max(len(run.steps) for run in of_names[baseline])
    shares = np.arange(max(1, int(_FROM * evaluations)), evaluations + 1) / evaluations
    for name, runs in of_names.items():
        if name == baseline:
            continue
        targets = [target(pairs(runs, of_names[baseline]), share) for share in shares]
        losses = [entry["loss"] for entry in targets]
        for unit, style in (("steps", "-"), ("time", "--")):
            factors = [np.nan if entry[f"speedup_{unit}"] is None else entry[f"speedup_{unit}"] for entry in targets]
            axes.plot(losses, factors, style, color=colors[name])
    axes.axhline(1, color=colors[baseline], linewidth=1)
    axes.invert_xaxis()
    axes.yaxis.set_major_formatter(lambda value, _: _times(value))
    axes.set(xlabel="target loss", ylabel=f"speed-up over {baseline}",
             title="Speed-up to equal loss (solid: steps, dashed: time)")
    axes.grid(alpha=0.3)


def _tasks(axes, outcome, colors):
    """Draws the speed-up in steps to the baseline's loss of each task, 0 if it is never reached."""
    for variant in outcome["variants"]:
        if variant["name"] != outcome["baseline"]:
            speedups = {task: entry["speedup_steps"] or 0.0 for task, entry in variant["tasks"].items()}
            axes.plot(list(speedups.values()), list(speedups), "o", color=colors[variant["name"]])
    axes.axvline(1, color=colors[outcome["baseline"]], linewidth=1)
    axes.xaxis.set_major_formatter(lambda value, _: _times(value))
    axes.set(xlabel=f"speed-up over {outcome['baseline']} in steps", title="By task")
    axes.grid(alpha=0.3)


def _times(speedup):
    """Returns the label of a speed-up: "2x", "1.33x later", and "never" for 0."""
    if speedup <= 0:
        return "never" if speedup == 0 else ""
    return f"{speedup:.3g}x" if speedup >= 1 else f"{1 / speedup:.3g}x later"


def _other_metrics(of_names):
    """Returns up to four values that all variants' evaluations have, without losses of tasks."""
    runs = [run for runs in of_names.values() for run in runs]
    names = set.intersection(*(set(run.values) for run in runs))
    return sorted(name for name in names if not name.endswith("/loss"))[:4]


def _metric(axes, of_names, colors, name):
    for variant, runs in of_names.items():
        _band(axes, *zip(*(run.values[name] for run in runs), strict=True), colors[variant])
    axes.set(xlabel="steps", title=name.removeprefix("eval/"))
    axes.grid(alpha=0.3)
