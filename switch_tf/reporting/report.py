"""Summaries of a run from its `metrics.jsonl`, and `report.html`."""

import base64
import collections
import contextlib
import html
import io
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import run_config, run_folder
from switch_tf.configs import directions
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import write_whole

with epy.lazy_imports():  # takes half a second
    import matplotlib
    import matplotlib.figure

# Heading -> explanation in HTML.
_EXPLANATIONS = {
    "Loss": """
Cross-entropy in nats for each target token. Training is a mean over the steps since the point before, with dropout and
jitter; held out is the validation split, without them. The unigram model knows only how frequent each token is, so a
loss below its line shows what was learnt about text.""",
    "Training": """
The learning rate that the next step takes (for Adafactor relative to each weight's own size), and the norm of the whole
gradient, a mean over steps.""",
    "Speed": """
Tokens are real ones, inputs and targets. Utilisation is the model's own work, forward and twice that backward, as a
share of what the processors can do: on a TPU or GPU their nominal rate, elsewhere the fastest rate measured on this
machine. More than 100% means that a chip is faster than its nominal rate. The model is idle while it waits for
input.""",
    "Time": """
Time of all processes that trained this run, by cause. The share of steps is the goodput. Redone are the steps,
evaluations and saves after the checkpoint that a later process resumed from. Start ends with the first step of a
process, without compilation and evaluation. Input is the wait for batches. The time of a killed process after its last
line is unknown.""",
    "Experts": """
Share of tokens counts the tokens that chose each expert, before capacity; a dark row is an expert that no token
chooses. Dropped tokens pass a layer by its residual connection alone. Entropy is that of the router's probabilities: 0
if it is certain, the logarithm of the number of experts if it has no preference. The load-balancing loss is 1 if all
experts get the same.""",
}
# Records that keep their arrays. The picture has no more columns.
_MOST_ARRAYS = 400
_STYLE = ("body{font-family:sans-serif;margin:2em;max-width:90em}img{max-width:100%}p{max-width:60em}"
          "pre{background:#f6f6f6;padding:1em;overflow-x:auto}")
_STYLE_OF_SUMMARY = "td:first-child{padding-right:2em;color:#555}"


def write(folder: pathlib.Path) -> None:
    """Writes `loss.png` and `report.html` from a run folder's `metrics.jsonl`, unless that is empty."""
    records = read_metrics(folder)
    if not records:
        return
    pictures = draw(records)
    write_whole(folder / "loss.png", pictures["Loss"])
    summary = summarize(folder, records)
    write_whole(folder / "report.html", _page(folder, summary, headline(folder, records, summary), pictures))


def summarize(folder: pathlib.Path, records: list[dict] | None = None) -> dict:
    """Returns a summary of a run from its `metrics.jsonl`.

    It has "step", "model_dir", "report" and "plot", the last "train/loss", the median "train/tokens_per_second", and
    for each held-out value its "first", "last" and "best" with their steps. A metric without a known direction has no
    best, and a unigram loss is a number. "time" is `time_by_cause`.
    """
    records = read_metrics(folder) if records is None else records
    summary: dict[str, Any] = {"step": max((record["step"] for record in records), default=0), "model_dir": str(folder),
               "report": str(folder / "report.html"), "plot": str(folder / "loss.png")}
    trained = [record for record in records if "train/loss" in record]
    if trained:
        summary["train/loss"] = trained[-1]["train/loss"]
        if speeds := series(trained, "train/tokens_per_second")[1]:
            summary["train/tokens_per_second"] = float(np.median(speeds))
    if times := time_by_cause(records):
        summary["time"] = times
    declared = directions.declared_in(records)
    for name, (steps, values) in evaluations(records).items():
        if name.endswith("/unigram_loss"):
            summary[name] = values[0]
        else:
            summary[name] = {"first": values[0], "last": values[-1], "first_step": steps[0], "last_step": steps[-1]}
            if (is_lower := directions.is_lower_better(name, declared)) is not None:
                best = (min if is_lower else max)(values)
                summary[name] |= {"best": best, "best_step": steps[values.index(best)]}
    return summary


def time_by_cause(records: list[dict]) -> dict[str, float]:
    """Returns cause -> seconds of a run's processes, the largest first, at most twelve."""
    seconds = collections.Counter[str]()
    for record in records:
        for name, value in record.items():
            if name.startswith(run_folder.SECONDS):
                seconds[name.split("/")[1]] += min(value or 0, 1_000_000_000_000)
    return dict((+seconds).most_common(12))


def headline(folder: pathlib.Path, records: list[dict], summary: dict) -> str:
    """Returns sentences on the model of a run, its work and its last results."""
    model, tokens, before = [], 0.0, 0
    loads: list[np.ndarray] = []
    with contextlib.suppress(Refusal, OSError):  # a damaged config.json is refused where it is needed
        model.append(f"{_amount(run_config.read(folder).model.num_parameters)} parameters")
    for record in records:
        if rate := record.get("train/tokens_per_second"):
            tokens += rate * (record.get("train/seconds_per_step") or 0) * (record["step"] - before)
        before = record["step"] if "train/loss" in record else before
        loads = [value for value in record.values() if isinstance(value, np.ndarray)] or loads
    if loads:
        model.append(f"{max(map(len, loads))} experts in each of {len(loads)} layers")
    text = f"{', '.join(model)}: " * bool(model) + f"{summary['step']:,} steps"
    text += f", about {_amount(float(f'{tokens:.3g}'))} tokens" * bool(tokens)
    if seconds := sum(summary.get("time", {}).values()):
        text += f" in {seconds:,.0f} s" if seconds < 120 else f" in {seconds / 60:,.0f} minutes"
    shares, scores = find_shares(summary), [name for name, value in summary.items()
                                            if name.startswith("eval/") and isinstance(value, dict)]
    start = 2 if len({name.rpartition("/")[0] for name in scores}) == 1 else 1  # without the one task's name
    results = [f"{name.split('/', start)[-1]} {shown(summary[name]['last'], name in shares)}" for name in scores[:6]]
    text += f". Held out: {', '.join(results)}" * bool(results)
    if loads:
        count, dead = sum(map(len, loads)), sum(int((load == 0).sum()) for load in loads)
        text += f". {dead} of {count} experts have no token" if dead else ". Every expert has tokens"
    return f"{text}."


def _amount(number):
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,.0f}"


def describe(value: dict, is_share: bool) -> str:
    """Returns the text of a summary entry: a first, last and best value, a share in per cent, or `time_by_cause`."""
    if "last" not in value:
        return f"{sum(value.values()):,.0f} s: {', '.join(_shares(value))}"
    return ", ".join(f"{word}{shown(value[key], is_share)} at step {value[f'{key}_step']}" for word, key in (
        ("", "first"), ("", "last"), ("best ", "best")) if key in value)


def read_metrics(folder: pathlib.Path) -> list[dict]:
    """Returns the records of a run folder's `metrics.jsonl`, oldest first.

    Skips torn lines and lines without a step, with a warning. Arrays (loads of experts) are <float32>, in a long run
    only in some hundred records at equal distances.
    """
    records: list[dict] = []
    kept, every, count = [], 1, 0  # every n-th record keeps its arrays
    for _, line in run_folder.records_of(folder / "metrics.jsonl"):
        record = {sys.intern(checks.printable(name)): value for name, value in line.items()}
        loads = {name: np.array(value, np.float32) for name, value in record.items()
                 if isinstance(value, list) and name.startswith("router/")}
        records.append({name: value for name, value in record.items() if name not in loads})
        if loads and count % every == 0:
            kept.append((records[-1], loads))
            if len(kept) > _MOST_ARRAYS:
                kept, every = kept[::2], 2 * every
        count += bool(loads)
    for record, loads in kept:
        record |= loads
    return records


def _page(folder, summary, words, pictures):
    rows, shares = [], find_shares(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            value = describe(value, name in shares)
        elif isinstance(value, float):
            value = f"{value:,.0f}" if name.endswith("per_second") else f"{value:.4f}"
        rows.append((name, value))
    images = "".join(f"<h2>{title}</h2>{image(title, png)}<p>{_EXPLANATIONS[title]}</p>"
                     for title, png in pictures.items())
    path, configuration = folder / run_folder.CONFIGURATION, ""
    if path.is_file():
        configuration = f"<h2>Configuration</h2><pre>{html.escape(path.read_text(errors='replace'))}</pre>"
    return page(f"switch_tf run {folder.name}",
                f"<style>{_STYLE_OF_SUMMARY}</style><p><b>{html.escape(words)}</b></p>{html_table(rows)}{images}"
                f"{configuration}")


def describe_summary(summary: dict) -> str:
    """Returns a few lines from a run's summary."""
    lines, shares = [f"Step {summary['step']}."], find_shares(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            share = f" (the last {value['last'] / value['first']:.0%} of the first)" if name.endswith("/loss") else ""
            lines.append(f"{name}: {describe(value, name in shares)}{share}")
        elif name.startswith("eval/"):
            lines.append(f"{name}: {value:.4f}, a model that knows only how frequent each token is")
    if "train/tokens_per_second" in summary:
        lines.append(f"{summary['train/tokens_per_second']:,.0f} tokens/s (median)")
    return "\n".join([*lines, f"Report: {summary['report']}", f"Plot:   {summary['plot']}"])


def align_columns(rows: list[list[str]]) -> list[str]:
    """Returns a table's lines: the first column left-aligned, further columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def page(title: str, body: str) -> str:
    """Returns an HTML page with a title of plain text."""
    title = html.escape(title)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{body}</html>\n")


def html_table(rows: Iterable[Iterable]) -> str:
    """Returns an HTML table of values."""
    return "<table>" + "".join("<tr>" + "".join(f"<td>{html.escape(str(entry))}</td>" for entry in row) + "</tr>"
                               for row in rows) + "</table>"


def image(text: str, png: bytes) -> str:
    """Returns the HTML of a PNG image with an alternative text."""
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


# Name of a value, title.
_TRAINING = (("train/learning_rate", "learning rate"), ("train/gradient_norm", "gradient norm before clipping"))
_SPEED = (("train/tokens_per_second", "tokens per second"),
          ("train/model_flops_utilization", "model FLOP utilisation"),
          ("train/input_wait_fraction", "time spent waiting for input"))
# Suffixes, drawn in per cent.
_SHARES = ("utilization", "wait_fraction", "tokens_dropped")
_EXPERTS = (("fraction_tokens_dropped", "tokens dropped"), ("router_entropy", "router entropy (nats)"),
            ("load_balancing_loss", "load-balancing loss (1 = even)"))


def draw(records: list[dict]) -> dict[str, bytes]:
    """Returns title -> PNG image: "Loss", "Training", "Speed", "Time" and, for a sparse model, "Experts"."""
    figures = {"Loss": _loss(records), "Training": _panels(records, _TRAINING), "Speed": _panels(records, _SPEED)}
    if times := time_by_cause(records):
        figures["Time"] = _bars(times)
    layers = sparse_layers(name for record in records for name, value in record.items() if value is not None)
    if layers:
        figures["Experts"] = _experts(records, layers)
    return {title: png(figure) for title, figure in figures.items()}


def series(records: list[dict], name: str) -> tuple[list[int], list]:
    """Returns the steps and values of one name, where present and finite."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def evaluations(records: list[dict]) -> dict[str, tuple[list[int], list]]:
    """Returns the `series` of each evaluated name, without empty ones."""
    names = sorted({name for record in records for name in record if name.startswith("eval/")})
    return {name: points for name in names if (points := series(records, name))[1]}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Any, np.ndarray]:
    """Returns a figure of a size in inches, and its axes [rows, columns]."""
    matplotlib.rcParams["text.parse_math"] = False  # names may hold dollar signs
    figure = matplotlib.figure.Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **grid)


def _loss(records):
    figure, ((axes,),) = new_figure(8, 5)
    curves = {"training": series(records, "train/cross_entropy")}
    levels = []
    for name, points in evaluations(records).items():
        task = name.split("/")[1]
        if name.endswith("/unigram_loss"):
            levels.append(points[1][0])
            axes.axhline(levels[-1], color="grey", linestyle="--", label=f"unigram model, {task}")
        elif name.endswith("/loss"):
            curves[f"held out, {task}"] = points
    for label, (steps, values) in curves.items():
        axes.plot(steps, values, label=label, marker="o" if label != "training" and len(steps) < 50 else None)
    # At step 0 it is twice the later values and would compress the axis.
    points = [point for curve in curves.values() for point in zip(*curve, strict=True)]
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
    figure.legend(loc="outside lower center", ncols=2)  # hides no curve
    return figure


def _panels(records, panels):
    figure, (row,) = new_figure(4 * len(panels), 3, 1, len(panels))
    for axes, (name, title) in zip(row, panels, strict=True):
        _curve(axes, records, name, title)
        axes.set_ylim(bottom=0)
    return figure


def _shares(times):
    return [f"{cause} {seconds / sum(times.values()):.1%}" for cause, seconds in times.items()]


def _bars(times):
    figure, ((axes,),) = new_figure(8, 3)
    axes.barh(_shares(times), [*times.values()])
    axes.set(xlabel="seconds", title="Time by cause")
    axes.invert_yaxis()
    return figure


def _curve(axes, records, name, title):
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
    figure, rows = new_figure(14, 2.7 * len(layers), len(layers), 1 + len(_EXPERTS))
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
            _curve(axes, records, router(layer, name), title)
    return figure


def _loads(records, layer):
    """Returns the steps, and the shares of tokens <float>[experts, steps], with the final number of experts."""
    steps, loads = series(records, router(layer, "expert_load"))
    kept = [(step, load) for step, load in zip(steps, loads, strict=True) if len(load) == len(loads[-1])]
    return [step for step, _ in kept], np.transpose(np.asarray([load for _, load in kept], float))


def png(figure: Any) -> bytes:
    """Returns a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


_LAYER = re.compile(r"(encoder|decoder)/[^/]*_[0-9]{1,9}(/.+)?")


def router(layer: str, name: str) -> str:
    """Returns the logged name of a router's statistic."""
    return f"router/{layer}/{name}"


def sparse_layers(names: Iterable[str]) -> list[str]:
    """Returns the layers in logged names, in the model's order. Ignores the malformed names of damaged files."""

    def position(layer):
        stack, number, *sublayer = layer.split("/")
        return stack == "decoder", int(number.rpartition("_")[2]), not sublayer, sublayer == ["attention", "key_value"]

    parts = [name.partition("/")[2].rpartition("/") for name in names if name.startswith("router/")]
    return sorted({layer for layer, _, name in parts if name == "expert_load" and _LAYER.fullmatch(layer)},
                  key=position)


def find_shares(names: Iterable[str]) -> set[str]:
    """Returns the names of shares: values from 0 to 1, shown in per cent.

    An "accuracy" next to a "token_accuracy" is a task's own metric, from 0 to 100 like seqio's.
    """
    names = set(names)
    return {name for name in names if name.endswith(("token_accuracy", "_utilization", "_wait_fraction")) or (
        name.rpartition("/")[2] == "accuracy" and name.removesuffix("accuracy") + "token_accuracy" not in names)}


def shown(value: float, is_share: bool) -> str:
    """Returns a value's text: four digits, or per cent for a share."""
    return f"{value:.1%}" if is_share else f"{value:.4f}"
