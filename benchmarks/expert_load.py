"""Expert load over training, of several runs side by side in one picture.

    .venv/bin/switch-tf train --gin_file=gin/runs/demo.gin --gin.TRAIN_STEPS=300 --gin.LOG_PERIOD=10 \
      --gin.MODEL_DIR="'runs/balanced'"
    .venv/bin/switch-tf train --gin_file=gin/runs/demo.gin --gin.TRAIN_STEPS=300 --gin.LOG_PERIOD=10 \
      --gin.MODEL_DIR="'runs/unbalanced'" --gin.SwitchConfig.load_balancing_loss_weight=0.0
    .venv/bin/python benchmarks/expert_load.py runs/balanced runs/unbalanced --plot expert_load.png

One row for each sparse layer, one column for each run: the share of the tokens that chose each expert, before capacity,
and below it the share of tokens that were dropped. The colours mean the same in all panels.
"""

import argparse
import json
import pathlib

import numpy as np

from switch_tf.reporting import report


def main():
    """Reads the run folders, draws the picture and prints the last logged numbers as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="run folders of sparse models")
    parser.add_argument("--plot", type=pathlib.Path, required=True, help="the picture to write")
    args = parser.parse_args()
    runs = {}
    for folder in args.runs:
        runs[folder.name] = [record for record in report.read_metrics(folder) if "train/loss" in record]
        if not any(report.sparse_layers(record) for record in runs[folder.name]):
            parser.error(f"{folder} holds no metrics.jsonl of a sparse model; give folders that switch-tf train wrote.")
    layers = report.sparse_layers(next(iter(runs.values()))[0])
    _figure(runs, layers).savefig(args.plot, dpi=110)
    for name, records in runs.items():
        for layer in layers:
            load = records[-1][report.router(layer, "expert_load")]
            print(json.dumps({
                "run": name, "layer": layer, "step": records[-1]["step"], "largest_load": max(load),
                "smallest_load": min(load),
                "fraction_tokens_dropped": records[-1][report.router(layer, "fraction_tokens_dropped")],
                "load_balancing_loss": records[-1][report.router(layer, "load_balancing_loss")]}))


def _figure(runs, layers):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max(max(record[report.router(layer, "expert_load")])
                  for records in runs.values() for record in records for layer in layers)
    figure, rows = pyplot.subplots(2 * len(layers), len(runs), squeeze=False, layout="constrained", sharex=True,
                                   figsize=(5.5 * len(runs), 4 * len(layers)),
                                   height_ratios=(2, 1) * len(layers))
    for column, (name, records) in enumerate(runs.items()):
        steps = [record["step"] for record in records]
        for row, layer in enumerate(layers):
            load = np.transpose([record[report.router(layer, "expert_load")] for record in records])
            panel, below = rows[2 * row][column], rows[2 * row + 1][column]
            image = panel.imshow(load, aspect="auto", interpolation="nearest", origin="lower", vmin=0, vmax=largest,
                                 extent=(steps[0], steps[-1], -0.5, len(load) - 0.5))
            panel.set(title=f"{name}: {layer}", ylabel="expert")
            below.plot(steps, [record[report.router(layer, "fraction_tokens_dropped")] for record in records])
            below.set(ylabel="dropped", ylim=(0, 1), xlabel="step" if row == len(layers) - 1 else "")
            below.grid(alpha=0.3)
    figure.colorbar(image, ax=rows[:, -1], label=f"share of tokens (even: {1 / len(load):.3f})")
    return figure


if __name__ == "__main__":
    main()
