"""Draws recall over steps, time, FLOPs and parameters from comparisons with several numbers of facts.

Reads the comparison.json of each folder, one for each number of facts, as `make compare-long` writes them. Writes one
picture, and a table as JSON lines.

    python benchmarks/facts_remembered.py runs/compare_long/facts_* --output=facts.png
"""

import argparse
import itertools
import json
import pathlib
import re

import numpy as np

AXES = {"steps": ("steps", 1), "seconds": ("minutes of training", 60), "flops": ("FLOPs of products with weights", 1)}


def read(folder: str) -> dict:
    """Returns `facts`, and for each variant `name`, `num_parameters`, the axes of its curves and `recall`, a share.

    Several seeds give medians, up to the shortest run.
    """
    found = json.loads((pathlib.Path(folder) / "comparison.json").read_text())
    metric = found["loss"].replace("/loss", "/sequence_accuracy")
    facts = int(re.search(r"random_facts_(\d+)", metric)[1])
    variants = []
    for variant in found["variants"]:
        seeds = [(seed["curves"], seed["values"][metric]) for seed in variant["seeds"]]
        shortest = min(len(curves["steps"]) for curves, _ in seeds)
        recalls = [dict(zip(values["steps"], values["values"], strict=True)) for _, values in seeds]
        variants.append({
            "name": variant["name"], "num_parameters": variant["num_parameters"],
            **{axis: np.median([curves[axis][:shortest] for curves, _ in seeds], axis=0) for axis in AXES},
            "recall": np.median([[recall[step] for step in curves["steps"][:shortest]]
                                 for recall, (curves, _) in zip(recalls, seeds, strict=True)], axis=0) / 100})
    return {"facts": facts, "variants": variants}


def draw(tables: list[dict], path: str) -> None:
    """Draws one column for each table of facts, and on the right the final recall over parameters."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    names = [variant["name"] for variant in tables[0]["variants"]]
    colors = dict(zip(names, ["tab:red", *pyplot.get_cmap("viridis")(np.linspace(0, 0.85, len(names) - 1))],
                      strict=True))
    figure, grid = pyplot.subplots(len(AXES), len(tables) + 1, figsize=(4.6 * (len(tables) + 1), 3.6 * len(AXES)),
                                   squeeze=False, layout="constrained")
    for column, table in zip(grid.T, tables, strict=False):
        for panel, (axis, (label, unit)) in zip(column, AXES.items(), strict=True):
            for variant in table["variants"]:
                panel.plot(variant[axis] / unit, 100 * variant["recall"], color=colors[variant["name"]],
                           label=variant["name"])
            panel.set(xlabel=label, ylabel="recalled whole (%)", ylim=(0, 100))
            panel.grid(alpha=0.3)
        column[0].set_title(f"{table['facts']:,} facts")
    grid[0, 0].legend()
    last = grid[0, -1]
    for table, style in zip(tables, itertools.cycle(("o-", "s--", "^:", "d-.")), strict=False):
        last.plot([variant["num_parameters"] for variant in table["variants"]],
                  [table["facts"] * variant["recall"][-1] for variant in table["variants"]], style, color="grey",
                  label=f"of {table['facts']:,}", zorder=1)
        for variant in table["variants"]:
            last.plot(variant["num_parameters"], table["facts"] * variant["recall"][-1], style[0],
                      color=colors[variant["name"]], zorder=2)
    last.set_xscale("log")
    last.xaxis.set_minor_formatter(ticker.NullFormatter())
    last.set(xlabel="parameters", ylabel="facts recalled whole", title="At the end")
    last.legend()
    last.grid(alpha=0.3)
    for panel in grid[1:, -1]:
        panel.set_visible(False)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    tables = sorted(map(read, arguments.folders), key=lambda table: table["facts"])
    for table in tables:
        for variant in table["variants"]:
            print(json.dumps({"facts": table["facts"], "variant": variant["name"],
                              "num_parameters": variant["num_parameters"], "steps": int(variant["steps"][-1]),
                              "recalled": round(table["facts"] * float(variant["recall"][-1]))}))
    draw(tables, arguments.output)


if __name__ == "__main__":
    main()
