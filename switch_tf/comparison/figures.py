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
    of_names, baseline = by_name(curves), outcome["baseline"]
    colors = dict(zip(of_names, pyplot().get_cmap("viridis")(np.linspace(0, 0.85, len(of_names))), strict=True))
    colors[baseline] = "tab:red"
    # Up to four values that all evaluations have, without losses of tasks.
    shared = set.intersection(*(set(run.values) for run in curves))
    others = sorted(name for name in shared if not name.endswith("/loss"))[:4]
    has_tasks = any(variant["tasks"] for variant in outcome["variants"])
    panels = 5 + len(others) + has_tasks
    rows = -(-panels // 3)
    figure, grid = pyplot().subplots(rows, 3, figsize=(15, 4.2 * rows), squeeze=False, layout="constrained")
    axes = list(grid.flat)
    longest = max(run.seconds[-1] for run in curves)
    time_unit, size = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    for panel, unit, field, scale in zip(
            axes, ("steps", f"{time_unit} of training", "FLOPs (matrix products with weights)", "tokens"),
            ("steps", "seconds", "flops", "tokens"), (1, size, 1, 1), strict=False):
        for name, runs in of_names.items():
            along, losses = _band(panel, [getattr(run, field) / scale for run in runs], [run.losses for run in runs],
                                  colors[name], name)
            reached = np.flatnonzero(losses <= outcome["target_loss"])[:1]
            panel.plot(along[reached], losses[reached], "o", color=colors[name])
        panel.axhline(outcome["target_loss"], color="grey", linestyle="--", linewidth=1, label="target loss")
        panel.set(xlabel=unit, ylabel="held-out loss (nats per token)", title=f"Loss over {unit}")
    _speedups(axes[4], of_names, colors, baseline)
    for panel, metric in zip(axes[5:], others, strict=False):
        for name, runs in of_names.items():
            along, values = zip(*(run.values[metric] for run in runs), strict=True)
            _band(panel, along, values, colors[name])
        panel.set(xlabel="steps", title=metric.removeprefix("eval/"))
    if has_tasks:  # speed-ups in steps to the baseline's loss of each task, 0 if it is never reached
        panel = axes[panels - 1]
        for variant in outcome["variants"]:
            if variant["name"] != baseline:
                speedups = {task: entry["speedup_steps"] or 0.0 for task, entry in variant["tasks"].items()}
                panel.plot(list(speedups.values()), list(speedups), "o", color=colors[variant["name"]])
        panel.axvline(1, color=colors[baseline], linewidth=1)
        panel.xaxis.set_major_formatter(lambda value, _: times(value, ".3g"))
        panel.set(xlabel=f"speed-up over {baseline} in steps", title="By task")
    for panel in axes[:panels]:
        panel.grid(alpha=0.3)
    for panel in axes[panels:]:
        panel.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(of_names) + 1))
    return png(figure)


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
            factors = np.array([entry[f"speedup_{unit}"] for entry in targets], float)  # None becomes NaN
            axes.plot(losses, factors, style, color=colors[name])
    axes.axhline(1, color=colors[baseline], linewidth=1)
    axes.invert_xaxis()
    axes.yaxis.set_major_formatter(lambda value, _: times(value, ".3g"))
    axes.set(xlabel="target loss", ylabel=f"speed-up over {baseline}",
             title="Speed-up to equal loss (solid: steps, dashed: time)")


def times(speedup: float | None, form: str = ".2f") -> str:
    """Formats a speed-up: "1.82x", "1.27x later", "never" for None and 0, "" for an axis below."""
    if not speedup:
        return "never"
    if speedup < 0:
        return ""
    return f"{speedup:{form}}x" if speedup >= 1 else f"{1 / speedup:{form}}x later"
