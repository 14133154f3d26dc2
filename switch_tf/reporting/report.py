"""Summarises a finished or interrupted run, and writes `report.html` with curves, explanations and configuration."""

import base64
import html
import pathlib
import sys
from typing import Any

import numpy as np

from switch_tf import checks
from switch_tf.checkpoints import run_folder
from switch_tf.configs import directions
from switch_tf.reporting import figures, names
from switch_tf.storage import places
from switch_tf.storage.whole_file import write_whole

# Heading of a picture -> explanation below it.
_EXPLANATIONS = {
    "Loss": "Cross-entropy in nats for each target token. Training is a mean over the steps since the point before, "
            "with dropout and jitter; held out is the validation split, without them. The unigram model knows only "
            "how frequent each token is, so a loss below its line shows what was learnt about text.",
    "Training": "The learning rate that the next step takes (for Adafactor relative to each weight's own size), and "
                "the norm of the whole gradient, a mean over steps.",
    "Speed": "Tokens are real ones, inputs and targets. Utilisation is the model's own work, forward and twice that "
             "backward, as a share of what the processors can do: on a TPU or GPU their nominal rate, elsewhere the "
             "fastest rate measured on this machine. More than 100% means that a chip is faster than its nominal rate. "
             "The model is idle while it waits for input.",
    "Experts": "Share of tokens counts the tokens that chose each expert, before capacity; a dark row is an expert "
               "that no token chooses. Dropped tokens pass a layer by its residual connection alone. Entropy is that "
               "of the router's probabilities: 0 if it is certain, the logarithm of the number of experts if it has no "
               "preference. The load-balancing loss is 1 if all experts get the same.",
}  # fmt: skip
# Largest number of records that keep their arrays. The picture has no more columns.
_MOST_ARRAYS = 400
_STYLE = ("body{font-family:sans-serif;margin:2em;max-width:90em}img{max-width:100%}p{max-width:60em}"
          "pre{background:#f6f6f6;padding:1em;overflow-x:auto}")
_STYLE_OF_SUMMARY = "th{text-align:left;padding-right:2em;font-weight:normal;color:#555}"


def write(folder: str | pathlib.Path) -> None:
    """Writes `loss.png` and `report.html` into a run folder from its `metrics.jsonl`, unless that is empty."""
    folder = places.at(folder)
    records = read_metrics(folder)
    if not records:
        return
    pictures = figures.draw(records)
    write_whole(folder / "loss.png", pictures["Loss"])
    write_whole(folder / "report.html", _page(folder, summary_of(folder, records), pictures))


def summarize(folder: str | pathlib.Path) -> dict:
    """Returns a summary of a run from its `metrics.jsonl`.

    It has "step", "model_dir", "report" and "plot", the last "train/loss", the median "train/tokens_per_second", and
    for each held-out value a dict of its "first", "last" and "best" with their steps. `directions` decides the best;
    a metric without a known direction has none.
    """
    return summary_of(places.at(folder), read_metrics(folder))


def summary_of(folder: pathlib.Path, records: list[dict]) -> dict:
    """Returns the summary of a run with these records of its `metrics.jsonl`, see `summarize`."""
    summary: dict[str, Any] = {"step": max((record["step"] for record in records), default=0), "model_dir": str(folder),
               "report": str(folder / "report.html"), "plot": str(folder / "loss.png")}
    trained = [record for record in records if "train/loss" in record]
    if trained:
        summary["train/loss"] = trained[-1]["train/loss"]
        if speeds := figures.series(trained, "train/tokens_per_second")[1]:
            summary["train/tokens_per_second"] = float(np.median(speeds))
    declared = directions.declared_in(records)
    for name in sorted({name for record in records for name in record if name.startswith("eval/")}):
        steps, values = figures.series(records, name)
        if values and name.endswith("/unigram_loss"):
            summary[name] = values[0]
        elif values:
            summary[name] = {"first": values[0], "last": values[-1], "first_step": steps[0], "last_step": steps[-1]}
            if (is_lower := directions.is_lower_better(name, declared)) is not None:
                best = (min if is_lower else max)(values)
                summary[name] |= {"best": best, "best_step": steps[values.index(best)]}
    return summary


def describe(value: dict, is_share: bool = False) -> str:
    """Returns the text of a summary entry with a first, last and best value. A share is in per cent."""
    return ", ".join(f"{word}{names.shown(value[key], is_share)} at step {value[f'{key}_step']}" for word, key in (
        ("", "first"), ("", "last"), ("best ", "best")) if key in value)


def read_metrics(folder: str | pathlib.Path) -> list[dict]:
    """Returns the records of a run folder's `metrics.jsonl`, oldest first.

    Skips a torn line, or one without a record of a step, with a warning. Arrays, the load of experts, are <float32>. In
    a long run only some hundred records at equal distances keep theirs.
    """
    records: list[dict] = []
    kept, every, count = [], 1, 0  # every n-th record keeps its arrays, so that memory does not grow with the run
    for _, line in run_folder.records_of(places.at(folder) / "metrics.jsonl"):
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


def _page(folder, summary, pictures):
    rows, shares = [], names.shares(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            value = describe(value, name in shares)
        elif isinstance(value, float):
            value = f"{value:,.0f}" if name.endswith("per_second") else f"{value:.4f}"
        rows.append(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>")
    images = "".join(f"<h2>{title}</h2>{image(title, png)}<p>{_EXPLANATIONS[title]}</p>"
                     for title, png in pictures.items())
    path, configuration = folder / run_folder.CONFIGURATION, ""
    if path.is_file():
        configuration = f"<h2>Configuration</h2><pre>{html.escape(path.read_text(errors='replace'))}</pre>"
    return page(f"switch_tf run {folder.name}",
                f"<style>{_STYLE_OF_SUMMARY}</style><table>{''.join(rows)}</table>{images}{configuration}")


def describe_summary(summary: dict) -> str:
    """Returns a few lines on the end of a run, from its summary with `step`, `report` and `plot`."""
    lines, shares = [f"Step {summary['step']}."], names.shares(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            share = f" (the last {value['last'] / value['first']:.0%} of the first)" if name.endswith("/loss") else ""
            lines.append(f"{name}: {describe(value, name in shares)}{share}")
        elif name.startswith("eval/"):
            lines.append(f"{name}: {value:.4f}, a model that knows only how frequent each token is")
    if "train/tokens_per_second" in summary:
        lines.append(f"{summary['train/tokens_per_second']:,.0f} tokens/s (median)")
    return "\n".join([*lines, f"Report: {summary['report']}", f"Plot:   {summary['plot']}"])


def page(title: str, body: str) -> str:
    """Returns an HTML page.

    Args:
        title: str, plain text.
        body: str, HTML.
    """
    title = html.escape(title)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{body}</html>\n")


def image(text: str, png: bytes) -> str:
    """Returns the HTML of an embedded PNG image with an alternative text."""
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
