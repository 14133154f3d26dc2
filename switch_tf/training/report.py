"""A finished or interrupted run as pictures: `loss.png`, and `report.html` with the curves and the experts."""

import base64
import html
import io
import json
import pathlib

import numpy as np

from switch_tf.training import names

_EXPERT_PANELS = (("fraction_tokens_dropped", "tokens dropped"), ("router_entropy", "router entropy (nats)"),
                  ("load_balancing_loss", "load-balancing loss (1 = even)"))


def write(folder) -> None:
    """Writes `loss.png` and `report.html` into a run folder from its `metrics.jsonl`; nothing where that is empty."""
    folder = pathlib.Path(folder)
    records = read_metrics(folder)
    if not records:
        return
    import matplotlib
    matplotlib.use("Agg")
    loss = _png(_loss_figure(records))
    (folder / "loss.png").write_bytes(loss)
    figures = [("Loss", loss), ("Speed", _png(_speed_figure(records)))]
    layers = names.sparse_layers(name for record in records for name in record)
    if layers:
        figures.append(("Experts", _png(_expert_figure(records, layers))))
    (folder / "report.html").write_text(_page(folder, records, figures))


def summarize(folder) -> dict:
    """First and last held-out loss, speed and files of a run, from its `metrics.jsonl`."""
    folder = pathlib.Path(folder)
    records = read_metrics(folder)
    summary = {"step": max((record["step"] for record in records), default=0), "model_dir": str(folder),
               "report": str(folder / "report.html"), "plot": str(folder / "loss.png")}
    trained = [record for record in records if "train/loss" in record]
    if trained:
        summary["train/loss"] = trained[-1]["train/loss"]
        summary["train/tokens_per_second"] = float(np.median([record["train/tokens_per_second"] for record in trained]))
    for name in sorted({name for record in records for name in record if name.startswith("eval/")}):
        steps, values = _series(records, name)
        if name.endswith("/unigram_loss"):
            summary[name] = values[0]
        else:
            summary[name] = {"first": values[0], "last": values[-1], "first_step": steps[0], "last_step": steps[-1]}
    return summary


def read_metrics(folder) -> list[dict]:
    """The records of a run folder's `metrics.jsonl`, oldest first."""
    path = pathlib.Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _series(records, name):
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _new_figure(width, height, rows=1, columns=1):
    from matplotlib import pyplot
    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _loss_figure(records):
    figure, ((axes,),) = _new_figure(8, 4.5)
    axes.plot(*_series(records, "train/cross_entropy"), color="tab:blue", alpha=0.7, label="training")
    for name in sorted({name for record in records for name in record if name.startswith("eval/")}):
        if name.endswith("/unigram_loss"):
            axes.axhline(_series(records, name)[1][0], color="grey", linestyle="--", label="unigram model, held out")
        elif name.endswith("/loss"):
            axes.plot(*_series(records, name), color="tab:orange", marker="o", label="held out")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per target token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _speed_figure(records):
    panels = (("train/tokens_per_second", "tokens per second"),
              ("train/model_flops_utilization", "model FLOP utilisation"),
              ("train/input_wait_fraction", "share of time waiting for input"))
    figure, (row,) = _new_figure(12, 3, 1, len(panels))
    for axes, (name, title) in zip(row, panels, strict=True):
        axes.plot(*_series(records, name), color="tab:blue")
        axes.set(xlabel="step", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return figure


def _expert_figure(records, layers):
    """One row a sparse layer: the load of every expert over the run, then what its router did."""
    figure, rows = _new_figure(14, 2.7 * len(layers), len(layers), 1 + len(_EXPERT_PANELS))
    for row, layer in zip(rows, layers, strict=True):
        steps, load = _series(records, names.router(layer, "expert_load"))
        num_experts = len(load[0])
        image = row[0].imshow(np.transpose(load), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0,
                              vmax=max(2 / num_experts, float(np.max(load))), origin="lower",
                              extent=(steps[0], steps[-1] or 1, -0.5, num_experts - 0.5) if len(steps) > 1 else None)
        row[0].set(title=f"{layer}: share of tokens\n(even: {1 / num_experts:.3f})", xlabel="step", ylabel="expert")
        figure.colorbar(image, ax=row[0])
        for axes, (name, title) in zip(row[1:], _EXPERT_PANELS, strict=True):
            axes.plot(*_series(records, names.router(layer, name)), color="tab:blue")
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
    return figure


def _png(figure) -> bytes:
    from matplotlib import pyplot
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _page(folder, records, figures):
    rows = []
    for name, value in summarize(folder).items():
        if isinstance(value, dict):
            value = (f"{value['first']:.4f} at step {value['first_step']}, {value['last']:.4f} at step "
                     f"{value['last_step']}")
        elif isinstance(value, float):
            value = f"{value:,.4f}"
        rows.append(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>")
    images = "".join(
        f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for title, png in figures)
    title = html.escape(f"switch_tf run {folder.name}")
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
            "<style>body{font-family:sans-serif;margin:2em;max-width:75em}th{text-align:left;padding-right:2em;"
            "font-weight:normal;color:#555}img{max-width:100%}</style>"
            f"<h1>{title}</h1><table>{''.join(rows)}</table>{images}</html>\n")
