"""The picture of docs/scale.md: how full each chip is, how long a step takes, and the floor below it."""

KINDS = {"weights, slots, gradients": ("weights", "slots", "gradients"),
         "activations and temporaries": ("temporaries",), "program": ("code",)}
PARTS = {"compute": "o", "memory": "s", "links": "^"}


def draw(found: dict[str, dict], path) -> None:
    """Draws a row for each answer of `switch-tf compile`, by name, the first on top, and saves the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    names = list(found)[::-1]
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(13, 0.42 * len(names) + 1.6), sharey=True,
                                             layout="constrained")
    starts = [0.0] * len(names)
    for kind, keys in KINDS.items():
        shares = [sum(found[name]["bytes_per_device"][key] for key in keys) / found[name]["chip_bytes"]
                  for name in names]
        memory.barh(names, shares, left=starts, label=kind)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    memory.axvline(1, color="black", linewidth=1)
    memory.set_xlim(0, 1.02)
    memory.xaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    memory.set_xlabel("of a chip's memory")

    milliseconds = {name: {key: 1e3 * found[name]["predicted"][f"{key}_seconds"] for key in PARTS} for name in names}
    for place, name in enumerate(names):
        time.barh(place, 1e3 * found[name]["predicted"]["step_seconds"], color="lightgray",
                  label="step" if place == 0 else None)
    for key, marker in PARTS.items():
        time.scatter([milliseconds[name][key] for name in names], range(len(names)), marker=marker, zorder=2,
                     label=f"{key} alone")
    time.set_xscale("log")
    time.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    time.set_xlabel("predicted milliseconds, not measured")
    time.grid(alpha=0.3, which="both", axis="x")
    for axis in (memory, time):
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
