"""Draws the curves of a run from the records of its `metrics.jsonl`, as PNG images."""

import io
import types
from typing import Any

import numpy as np

from switch_tf.reporting import names

# Panels of a figure: the name of a value, and a title.
_TRAINING = (("train/learning_rate", "learning rate"), ("train/gradient_norm", "gradient norm before clipping"))
_SPEED = (("train/tokens_per_second", "tokens per second"),
          ("train/model_flops_utilization", "model FLOP utilisation"),
          ("train/input_wait_fraction", "time spent waiting for input"))
# Suffixes of shares, which are drawn in per cent.
_SHARES = ("utilization", "wait_fraction", "tokens_dropped")
_EXPERTS = (("fraction_tokens_dropped", "tokens dropped"), ("router_entropy", "router entropy (nats)"),
            ("load_balancing_loss", "load-balancing loss (1 = even)"))


def draw(records: list[dict]) -> dict[str, bytes]:
    """Returns title -> PNG image: "Loss", "Training", "Speed" and, for a sparse model, "Experts"."""
    figures = {"Loss": _loss(records), "Training": _panels(records, _TRAINING), "Speed": _panels(records, _SPEED)}
    layers = names.sparse_layers(name for record in records for name, value in record.items() if value is not None)
    if layers:
        figures["Experts"] = _experts(records, layers)
    return {title: png(figure) for title, figure in figures.items()}


def pyplot() -> types.ModuleType:
    """Returns matplotlib.pyplot for a machine without a display, imported when a figure is drawn: it takes a second."""
    import matplotlib  # here, because the back end is chosen before pyplot is imported
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # names of metrics and runs may hold dollar signs
    from matplotlib import pyplot
    return pyplot


def series(records: list[dict], name: str) -> tuple[list[int], list]:
    """Returns the steps and values of one name, without those that are missing or not finite."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _new(width, height, rows=1, columns=1):
    return pyplot().subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _loss(records):
    figure, ((axes,),) = _new(8, 5)
    curves, levels = [(series(records, "train/cross_entropy"), "tab:blue", None, "training")], []
    others = iter(pyplot().get_cmap("tab10").colors[1:] * len(records))
    for name in sorted({name for record in records for name in record if name.startswith("eval/")}):
        task = name.split("/")[1]
        points = series(records, name)
        if not points[1]:
            continue
        if name.endswith("/unigram_loss"):
            levels.append(points[1][0])
            axes.axhline(levels[-1], color="grey", linestyle="--", label=f"unigram model, {task}")
        elif name.endswith("/loss"):
            curves.append((points, next(others), "o" if len(points[0]) < 50 else None, f"held out, {task}"))
    for (steps, values), color, marker, label in curves:
        axes.plot(steps, values, color=color, marker=marker, label=label)
    # The loss at step 0 is text, because it is twice the later values and would compress the axis.
    points = [point for (steps, values), *_ in curves for point in zip(steps, values, strict=True)]
    learnt, start = [value for step, value in points if step], [value for step, value in points if not step]
    if learnt and start:
        high = max(learnt + levels)
        top = high + 0.08 * (high - min(learnt))
        if max(start) > top:
            axes.set_ylim(top=top)
            axes.annotate(f"step 0: {max(start):.2f}", (0, 1), xycoords=("data", "axes fraction"), xytext=(6, -14),
                          textcoords="offset points", color="tab:orange")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per target token)", title="Loss")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)  # beside the axes, where it hides no curve
    return figure


def _panels(records, panels):
    figure, (row,) = _new(4 * len(panels), 3, 1, len(panels))
    for axes, (name, title) in zip(row, panels, strict=True):
        _curve(axes, records, name, title)
        axes.set_ylim(bottom=0)
    return figure


def _curve(axes, records, name, title):
    """Draws the values of a name: shares in per cent, and rates as whole numbers with commas."""
    axes.plot(*series(records, name), color="tab:blue")
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    if name.endswith(_SHARES):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    elif name.endswith("per_second"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)


def _experts(records, layers):
    """Draws a row for each sparse layer: the load of its experts over the run, then its router's statistics."""
    figure, rows = _new(14, 2.7 * len(layers), len(layers), 1 + len(_EXPERTS))
    for row, layer in zip(rows, layers, strict=True):
        steps, load = _loads(records, layer)
        num_experts = len(load)
        image = row[0].imshow(load, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0,
                              vmax=max(2 / num_experts, float(np.nanmax(load))), origin="lower",
                              extent=(steps[0], steps[-1] or 1, -0.5, num_experts - 0.5) if len(steps) > 1 else None)
        even = f"even: {100 / num_experts:.3g}%"
        row[0].set(title=f"{layer}: share of tokens\n({even})", xlabel="step", ylabel="expert")
        figure.colorbar(image, ax=row[0], format=lambda value, _: f"{100 * value:.3g}%")
        for axes, (name, title) in zip(row[1:], _EXPERTS, strict=True):
            _curve(axes, records, names.router(layer, name), title)
    return figure


def _loads(records, layer):
    """Returns the steps, and the shares of tokens <float>[experts, steps], with the final number of experts."""
    steps, loads = series(records, names.router(layer, "expert_load"))
    kept = [(step, load) for step, load in zip(steps, loads, strict=True) if len(load) == len(loads[-1])]
    return [step for step, _ in kept], np.transpose(np.asarray([load for _, load in kept], float))


def png(figure: Any) -> bytes:
    """Returns a matplotlib figure as a PNG image, and closes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot().close(figure)
    return buffer.getvalue()
