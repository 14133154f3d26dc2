"""The picture of a comparison: held-out loss over steps, time, FLOPs and tokens, and how much sooner it is reached."""

import io

import numpy as np

from switch_tf.comparison.curves import Curves
from switch_tf.comparison.results import pairs, speedup

# Evaluations before this share of the baseline's run are of models that have learnt next to nothing.
_FROM = 0.2


def draw(curves: list[Curves], found: dict) -> bytes:
    """One PNG.

    Args:
        curves: runs; of a variant's several seeds the median is a line and their range a band.
        found: from `results.compare`.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_name: dict[str, list[Curves]] = {}
    for run in curves:
        by_name.setdefault(run.name, []).append(run)
    colors = dict(zip(by_name, pyplot.get_cmap("viridis")(np.linspace(0, 0.85, len(by_name))), strict=True))
    colors[found["baseline"]] = "tab:red"
    others = _other_metrics(by_name)
    has_tasks = any(variant["tasks"] for variant in found["variants"])
    panels = 5 + len(others) + has_tasks
    rows = -(-panels // 3)
    figure, grid = pyplot.subplots(rows, 3, figsize=(15, 4.2 * rows), squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for panel, (unit, of_run) in zip(axes, _axes(by_name).items(), strict=False):
        _losses(panel, by_name, colors, found, unit, of_run)
    _speedups(axes[4], by_name, colors, found["baseline"])
    for panel, name in zip(axes[5:], others, strict=False):
        _metric(panel, by_name, colors, name)
    if has_tasks:
        _tasks(axes[panels - 1], found, colors)
    for panel in axes[panels:]:
        panel.set_visible(False)
    axes[0].legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    pyplot.close(figure)
    return buffer.getvalue()


def _axes(by_name):
    """Title of a horizontal axis -> function from a run to its values there."""
    runs = [run for runs in by_name.values() for run in runs]
    longest = max(run.seconds[-1] for run in runs)
    unit, size = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    return {"steps": lambda run: run.steps, f"{unit} of training": lambda run: run.seconds / size,
            "FLOPs of products with weights": lambda run: run.flops, "tokens": lambda run: run.tokens}


def _losses(axes, by_name, colors, found, unit, of_run):
    for name, runs in by_name.items():
        shortest = min(len(run.losses) for run in runs)
        along = np.median([of_run(run)[:shortest] for run in runs], axis=0)
        losses = np.array([run.losses[:shortest] for run in runs])
        axes.plot(along, np.median(losses, axis=0), color=colors[name], label=name)
        if len(runs) > 1:
            axes.fill_between(along, losses.min(axis=0), losses.max(axis=0), color=colors[name], alpha=0.2, linewidth=0)
        at = np.flatnonzero(np.median(losses, axis=0) <= found["target_loss"])
        if len(at):
            axes.plot(along[at[0]], np.median(losses, axis=0)[at[0]], "o", color=colors[name])
    axes.axhline(found["target_loss"], color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel=unit, ylabel="held-out cross-entropy (nats per token)", title=f"Loss over {unit}")
    axes.grid(alpha=0.3)


def _speedups(axes, by_name, colors, baseline):
    """Solid: in steps; dashed: in time; over the losses that the baseline passes through."""
    for name, runs in by_name.items():
        if name == baseline:
            continue
        for which, style in ((0, "-"), (1, "--")):
            losses, factors = [], []
            for run, reference in pairs(runs, by_name[baseline])[:1]:
                for index in range(int(_FROM * len(reference.steps)), len(reference.steps)):
                    factor = speedup(run, reference, index)[which]
                    losses.append(reference.losses[index])
                    factors.append(np.nan if factor is None else factor)
            axes.plot(losses, factors, style, color=colors[name], label=f"{name}, in {('steps', 'time')[which]}")
    axes.axhline(1, color=colors[baseline], linewidth=1)
    axes.invert_xaxis()
    axes.set(xlabel=f"loss that {baseline} gets to", ylabel=f"times sooner than {baseline}",
             title="Speed-up to equal loss")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _tasks(axes, found, colors):
    """How much sooner in steps each task of a mixture gets to the baseline's loss of it; 0 where it does not."""
    for variant in found["variants"]:
        if variant["name"] != found["baseline"]:
            sooner = {task: entry["speedup_steps"] or 0.0 for task, entry in variant["tasks"].items()}
            axes.plot(list(sooner.values()), list(sooner), "o", color=colors[variant["name"]])
    axes.axvline(1, color=colors[found["baseline"]], linewidth=1)
    axes.set(xlabel=f"times sooner than {found['baseline']} in steps (0: never)", title="By task")
    axes.grid(alpha=0.3)


def _other_metrics(by_name):
    """Whatever else all variants' evaluations write, but for the losses of tasks."""
    runs = [run for runs in by_name.values() for run in runs]
    names = set.intersection(*(set(run.values) for run in runs))
    return sorted(name for name in names if not name.endswith("/loss"))[:4]


def _metric(axes, by_name, colors, name):
    for variant, runs in by_name.items():
        for run in runs[:1]:
            axes.plot(*run.values[name], color=colors[variant])
    axes.set(xlabel="steps", title=name.removeprefix("eval/"))
    axes.grid(alpha=0.3)
