"""Output of a benchmark: JSON lines on standard output, tables on standard error, a plot."""

import json
import sys

COLUMNS = (
    ("contender", "contender", "{}"), ("median", "median_seconds", "{:.4g} s"), ("min", "min_seconds", "{:.4g} s"),
    ("ratio", "ratio", "{:.2f}"), ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("TFLOP/s", "tflops_per_second", "{:.3g}"),
    ("blocked", "blocked_seconds", "{:.3g} s"), ("commit", "commit_seconds", "{:.3g} s"),
    ("dropped", "fraction_dropped", "{:.1%}"), ("peak", "peak_mib", "{:,.0f} MiB"),
    ("growth", "peak_growth_mib", "{:,.0f} MiB"), ("over start", "over_start_mib", "{:,.0f} MiB"), ("", "note", "{}"))


def print_lines(results):
    """Prints one JSON object for each result on standard output."""
    for result in results:
        print(json.dumps(result), flush=True)


def print_table(title, results):
    """Prints a table of the results on standard error, without empty columns."""
    columns = [column for column in COLUMNS if any(result.get(column[1]) not in (None, "") for result in results)]
    rows = [[heading for heading, _, _ in columns]]
    for result in results:
        rows.append([form.format(result[key]) if result.get(key) is not None else "" for _, key, form in columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}", file=sys.stderr)
    for row in rows:
        # Names to the left, numbers to the right, notes as long as they are.
        cells = [cell.ljust(width) if index == 0 else cell if columns[index][1] == "note" else cell.rjust(width)
                 for index, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip(), file=sys.stderr)
    print(file=sys.stderr, flush=True)


def plot(results, path, panel, along, label, value):
    """Draws one panel for each combination of the values of `panel` and saves the figure.

    Args:
        results: Results.
        path: Path of the PNG.
        panel: Keys.
        along: Key of the horizontal axis: one line for each contender, both axes logarithmic. With a single value, one
            bar for each contender.
        label: Label of the axis of `value`.
        value: str, key of what is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in results if result.get(value) is not None]
    if not results:
        print("There is nothing to plot: no contender ran.", file=sys.stderr)
        return
    panels = {}
    for result in results:
        panels.setdefault(tuple(result[key] for key in panel), []).append(result)
    names = list(dict.fromkeys(result["contender"] for result in results))
    colors = {name: pyplot.get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
    draw = _bars if len({result[along] for result in results}) == 1 else _lines
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.5 * len(panels) + 2, 5), squeeze=False,
                                   layout="constrained", sharex="all", sharey="all")
    for axis, (values, own) in zip(axes[0], panels.items(), strict=True):
        axis.set_title(", ".join(f"{key} {shown}" for key, shown in zip(panel, values, strict=True)).replace("_", " "))
        draw(axis, own, colors, along, label, value)
    if draw is _lines:
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"Plot: {path}", file=sys.stderr)


def _bars(axis, results, colors, along, label, value):
    """Draws one bar for each contender, the first on top."""
    shown = {result["contender"]: result[value] for result in results}
    names = list(colors)[::-1]
    axis.barh(names, [shown.get(name, 0) for name in names], color=[colors[name] for name in names])
    axis.set_xlabel(label)


def _lines(axis, results, colors, along, label, value):
    """Draws one line for each contender."""
    from matplotlib import ticker

    for name, color in colors.items():
        points = sorted((result[along], result[value]) for result in results if result["contender"] == name)
        if points:
            axis.loglog(*zip(*points, strict=True), marker="o", label=name, color=color)
    places = sorted({result[along] for result in results})
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_xlabel(along)
    axis.set_ylabel(label)
    axis.grid(alpha=0.3, which="both")
