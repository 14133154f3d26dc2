"""Reports on run folders: comparison.json, a page with plots, and a table."""

import html
import pathlib
import re
from collections.abc import Iterable

import numpy as np

from switch_tf.checkpoints.folders import checkpoints_of
from switch_tf.comparison import results
from switch_tf.comparison.results import Curves
from switch_tf.refusals import Refusal
from switch_tf.reporting.report import align_columns, html_table, image, matplotlib, new_figure, page, png
from switch_tf.storage import json_lines, outputs, places
from switch_tf.storage.whole_file import write_whole, writing

_SEED = re.compile(r"seed_\d+")
_WORDS = """
The router's share of the FLOPs stands beside each variant. Capacity padding is what experts compute for empty slots,
in addition. Losses are cross-entropies of the validation split in nats per token, each averaged over up to three
evaluations. The speed-up is the number of steps, or seconds, that the baseline needs to the target loss, divided by the
variant's; a variant that needs more is later. The target loss is the baseline's last one: the dashed line, which each
curve reaches at its dot. Seconds are those of training steps alone: the first steps of each turn, evaluation,
checkpoints and compilation do not count. With several seeds, lines are medians and bands the whole range."""
_STYLE = ("table{border-collapse:collapse}td{padding:.3em 1em;text-align:right;border-bottom:1px solid #ddd}"
          "tr:first-child{font-weight:bold}td:first-child{text-align:left}")


def find(folders: Iterable) -> list[tuple[str, pathlib.Path]]:
    """Returns (name of the variant, run folder) of at least two different runs.

    `folders` are run folders, and folders of comparisons.
    """
    runs = []
    for folder in map(places.at, folders):
        runs_of_comparison = sorted(path.parent for path in folder.glob("*/seed_*/checkpoints"))
        runs += [folder] if checkpoints_of(folder).is_dir() or not runs_of_comparison else runs_of_comparison
    if len(runs) < 2:
        raise Refusal("--runs compares at least two run folders; name several, or the folder of a comparison.")
    named = {}
    for folder in runs:
        place = folder.resolve()
        if place in named:
            raise Refusal(f"--runs names {str(folder)!r} twice; name each run once.")
        named[place] = (folder.parent if _SEED.fullmatch(place.name) else folder).resolve().name, folder
    return list(named.values())


def report(output: places.Place, runs: Iterable[tuple[str, pathlib.Path]], is_complete: bool = True) -> dict:
    """Writes and prints the report on `runs`, pairs of (variant, run folder).

    Unless `is_complete`, runs without an evaluation are left out.

    Returns:
        The content of comparison.json, {} without evaluations.
    """
    evaluated = []
    for name, folder in runs:
        try:
            evaluated.append(results.read(folder, name))
        except Refusal:
            if is_complete:
                raise
    if not evaluated:
        outputs.say("No run was evaluated yet, so there is no report.")
        return {}
    folder = places.at(output)
    outcome = write(folder, results.told_apart(evaluated))
    print(table(outcome), *words(outcome), f"Report: {folder / 'comparison.html'}",
          f"Plot:   {folder / 'comparison.png'}", sep="\n")
    return outcome


def write(folder: pathlib.Path, runs: list[Curves]) -> dict:
    """Writes the three files, and returns the content of comparison.json."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    outcome = results.compare(runs)
    picture = draw(runs, outcome)
    for kind, content in (("json", json_lines.dumps(outcome, indent=1) + "\n"), ("png", picture),
                          ("html", _page(runs, outcome, picture))):
        write_whole(folder / f"comparison.{kind}", content)
    return outcome


def _rows(outcome):
    return [("variant", "experts", "parameters", "FLOPs/token", "router", "padding", "s/step", "final loss",
             "speed-up in steps", "speed-up in time"), *(
        (variant["name"], str(variant["num_experts"]), f"{variant['num_parameters']:,}",
         f"{variant['flops_per_token']:,.0f}", f"{variant['router_flops_share']:.1%}",
         f"{variant['capacity_padding_share']:.1%}",
         f"{variant['seconds_per_step']:.4f} ({variant['step_time_over_dense']:.2f}x)",
         f"{variant['final_loss']:.4f}", times(variant["speedup_steps"]), times(variant["speedup_time"]))
        for variant in outcome["variants"])]


def table(outcome: dict) -> str:
    """Returns the table for a terminal."""
    return "\n".join(align_columns(_rows(outcome)))


def words(outcome: dict) -> list[str]:
    """Returns sentences: the target loss, differences between runs, and each variant's result."""
    baseline, period = outcome["baseline"], outcome["evaluation_period"]
    lines = [f"Target loss: {outcome['target_loss']:.4f}, the last loss of {baseline} ({outcome['smoothing']}); "
             f"evaluated every {period} steps, so no speed-up is finer than that."]
    lines += [f"Not equal: {remark}" for remark in outcome["not_equal"]]
    num_tests = sum(variant["p_value"] is not None for variant in outcome["variants"])
    for variant in outcome["variants"]:
        name, in_steps, in_time = variant["name"], variant["speedup_steps"], variant["speedup_time"]
        if name == baseline:
            continue
        lines.append(_difference(variant, baseline, num_tests))
        if in_steps is None:
            lines.append(f"{name} does not get there: it ends at {variant['final_loss']:.4f}.")
        else:
            sides = ["sooner" if speedup >= 1 else "later" for speedup in (in_steps, in_time)]
            line = (f"{name} gets there {max(in_steps, 1 / in_steps):.2f} times {sides[0]} in steps and "
                    f"{max(in_time, 1 / in_time):.2f} times {sides[1] + ' ' if sides[0] != sides[1] else ''}in time")
            if len(variant["seeds"]) > 1:
                by_seed = ", ".join(times(seed["speedup_steps"]).replace("x", "") for seed in variant["seeds"])
                line += f" (the median of {len(variant['seeds'])} seeds: {by_seed} in steps)"
            lines.append(f"{line}.")
        if kept := variant["distilled"]:
            size = f"with {kept['compression']:.0%} fewer parameters"
            if kept["share"] is None:
                lines.append(f"{kept['teacher']} is no better than {baseline}, so there is no gain that {name}, "
                             f"{size}, could keep.")
                continue
            by_seed = ", ".join("none to keep" if share is None else f"{share:.0%}" for share in kept["shares"])
            amount = f"{kept['share']:.0%}" if kept["share"] > 0 else "nothing"
            lines.append(f"{name} keeps {amount} of the gain of {kept['teacher']} over {baseline} "
                         + f"({by_seed} by seed) " * (len(kept["shares"]) > 1) + f"{size}.")
    return lines


def _difference(variant, baseline, num_tests):
    mean, smallest, num_seeds = variant["loss_over_baseline"], variant["smallest_effect"], len(variant["seeds"])
    line = (f"{variant['name']} ends {abs(mean):.4f} {'above' if mean > 0 else 'below'} {baseline}" if mean else
            f"{variant['name']} ends level with {baseline}")
    if smallest is None:
        few = "one seed does" if num_seeds == 1 else f"seeds that {baseline} was not trained with do"
        return f"{line}; {few} not say how much of that is chance."
    by_seed = ", ".join(f"{seed['loss_over_baseline']:+.4f}" for seed in variant["seeds"])
    p_value = variant["p_value"]
    shown = "< 0.001" if p_value < 0.001 else f"= {p_value:.2g}"
    holm = f", by Holm's method for {num_tests} variants," if num_tests > 1 else ""
    return (f"{line} ({by_seed} by seed), which is {'more' if p_value < 0.05 else 'no more'} than chance may do "
            f"(p {shown}): what {num_seeds} seeds can tell here with 95 % certainty{holm} is {smallest:.4f}.")


def _page(runs, outcome, picture):
    variants = outcome["variants"]
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in words(outcome))
    targets = [("variant", *(f"{target['loss']:.4f}" for target in variants[0]["targets"])), *(
        (variant["name"], *(f"{times(target['speedup_steps'])}, {times(target['speedup_time'])}"
                            for target in variant["targets"])) for variant in variants)]
    tasks = [("task", "variant", "final loss", "speed-up in steps", "speed-up in time"), *(
        (task, variant["name"], f"{entry['final_loss']:.4f}", times(entry["speedup_steps"]),
         times(entry["speedup_time"])) for task in variants[0]["tasks"] for variant in variants
        if (entry := variant["tasks"].get(task)))]
    by_task = f"<h2>By task</h2>{html_table(tasks)}" if len(tasks) > 1 else ""
    folders = [("variant", "seed", "folder"), *((run.name, run.seed, run.folder) for run in runs)]
    return page("Dense against sparse", f"<style>{_STYLE}</style>{sentences}{html_table(_rows(outcome))}"
                f"{image('curves', picture)}"
                f"<h2>Speed-up over {html.escape(outcome['baseline'])} to several target losses (in steps, in time)"
                f"</h2>{html_table(targets)}<p>{html.escape(outcome['work'])} {_WORDS}</p>{by_task}"
                f"<h2>Runs</h2>{html_table(folders)}")


# Earlier in the baseline's run, models have hardly learnt.
_FROM = 0.2


def draw(curves: list[Curves], outcome: dict) -> bytes:
    """Returns a PNG. For several seeds a line is the median and a band the range."""
    of_names, baseline = results.group_by_name(curves), outcome["baseline"]
    colors = dict(zip(of_names, matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(of_names))), strict=True))
    colors[baseline] = "tab:red"
    shared = set.intersection(*(set(run.values) for run in curves))
    metrics = sorted(name for name in shared if not name.endswith("/loss"))[:4]
    has_tasks = any(variant["tasks"] for variant in outcome["variants"])
    rows = -(-(5 + len(metrics) + has_tasks) // 3)
    figure, grid = new_figure(15, 4.2 * rows, rows, 3)
    for panel in grid.flat:
        panel.grid(alpha=0.3)
    panels = iter(grid.flat)
    longest = max(run.seconds[-1] for run in curves)
    time_unit, size = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    for unit, field, scale in (("steps", "steps", 1), (f"{time_unit} of training", "seconds", size),
                               ("FLOPs (matrix products with weights)", "flops", 1), ("tokens", "tokens", 1)):
        panel = next(panels)
        for name, runs in of_names.items():
            seeds = [(getattr(run, field) / scale, run.losses) for run in runs]
            along, losses = _band(panel, seeds, colors[name], name)
            reached = np.flatnonzero(losses <= outcome["target_loss"])[:1]
            panel.plot(along[reached], losses[reached], "o", color=colors[name])
        panel.axhline(outcome["target_loss"], color="grey", linestyle="--", linewidth=1, label="target loss")
        panel.set(xlabel=unit, ylabel="held-out loss (nats per token)", title=f"Loss over {unit}")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(of_names) + 1))
    # Median speed-ups to the baseline's losses.
    panel = next(panels)
    evaluations = max(len(run.steps) for run in of_names[baseline])
    shares = np.arange(max(1, int(_FROM * evaluations)), evaluations + 1) / evaluations
    for name, runs in of_names.items():
        if name != baseline:
            targets = [results.target(results.pairs(runs, of_names[baseline]), share) for share in shares]
            for unit, style in (("steps", "-"), ("time", "--")):
                factors = np.array([entry[f"speedup_{unit}"] for entry in targets], float)  # NaN
                panel.plot([entry["loss"] for entry in targets], factors, style, color=colors[name])
    panel.axhline(1, color=colors[baseline], linewidth=1)
    panel.invert_xaxis()
    panel.yaxis.set_major_formatter(lambda value, _: times(value, ".3g"))
    panel.set(xlabel="target loss", ylabel=f"speed-up over {baseline}",
              title="Speed-up to equal loss (solid: steps, dashed: time)")
    for metric in metrics:
        panel = next(panels)
        for name, runs in of_names.items():
            _band(panel, [run.values[metric] for run in runs], colors[name])
        panel.set(xlabel="steps", title=metric.removeprefix("eval/"))
    if has_tasks:  # speed-ups in steps, 0 if not reached
        panel = next(panels)
        for variant in outcome["variants"]:
            if variant["name"] != baseline:
                speedups = {task: entry["speedup_steps"] or 0.0 for task, entry in variant["tasks"].items()}
                panel.plot(list(speedups.values()), list(speedups), "o", color=colors[variant["name"]])
        panel.axvline(1, color=colors[baseline], linewidth=1)
        panel.xaxis.set_major_formatter(lambda value, _: times(value, ".3g"))
        panel.set(xlabel=f"speed-up over {baseline} in steps", title="By task")
    for panel in panels:
        panel.set_visible(False)
    return png(figure)


def _band(axes, seeds, color, name=None):
    """Draws the median of seeds, pairs of coordinates, and the range of several. Returns the median's coordinates."""
    shortest = min(len(values) for _, values in seeds)
    # [seed, 2, evaluation]
    points = np.array([[coordinate[:shortest] for coordinate in seed] for seed in seeds])
    values, (along, line) = points[:, 1], np.median(points, axis=0)
    axes.plot(along, line, color=color, label=name)
    if len(values) > 1:
        axes.fill_between(along, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    return along, line


def times(speedup: float | None, form: str = ".2f") -> str:
    """Formats a speed-up: "1.82x", "1.27x later", "never" for None and 0, "" for axis ticks below 0."""
    if not speedup:
        return "never"
    if speedup < 0:
        return ""
    return f"{speedup:{form}}x" if speedup >= 1 else f"{1 / speedup:{form}}x later"
