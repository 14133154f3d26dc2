"""Reports a comparison: comparison.json, comparison.png, comparison.html, and a table for the terminal."""

import html
import pathlib

from switch_tf.comparison import distilled, figures, results
from switch_tf.comparison.curves import Curves
from switch_tf.reporting import page
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import write_whole, writing

_WORDS = (
    "The router's share of the FLOPs stands beside each variant. Capacity padding is what experts compute for empty "
    "slots, in addition. Losses are cross-entropies of the validation split in nats per token, each averaged over up "
    "to three evaluations. The speed-up is the number of steps, or seconds, that the baseline needs to the target "
    "loss, divided by the variant's; a variant that needs more is later. The target loss is the baseline's last one: "
    "the dashed line, which each curve reaches at its dot. Seconds are those of training steps alone: the first steps "
    "of each turn, evaluation, checkpoints and compilation do not count. With several seeds, lines are medians and "
    "bands the whole range.")
_STYLE = ("table{border-collapse:collapse}th,td{padding:.3em 1em;text-align:right;border-bottom:1px solid #ddd}"
          "th:first-child,td:first-child{text-align:left}")
_COLUMNS = ("variant", "experts", "parameters", "FLOPs/token", "router", "padding", "s/step", "final loss",
            "speed-up in steps", "speed-up in time")


def write(folder: str | pathlib.Path, curves: list[Curves]) -> dict:
    """Writes the three files into a folder and returns the content of comparison.json."""
    folder = places.at(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    outcome = results.compare(curves)
    picture = figures.draw(curves, outcome)
    write_whole(folder / "comparison.json", json_lines.dumps(outcome, indent=1) + "\n")
    write_whole(folder / "comparison.png", picture)
    write_whole(folder / "comparison.html", _page(curves, outcome, picture))
    return outcome


def table(outcome: dict) -> str:
    """Returns the table for a terminal."""
    rows = [_COLUMNS, *(_row(variant) for variant in outcome["variants"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(f"{entry:<{width}}" if column == 0 else f"{entry:>{width}}"
                               for column, (entry, width) in enumerate(zip(row, widths, strict=True))) for row in rows)


def words(outcome: dict) -> list[str]:
    """Returns sentences: the target loss, the differences between runs, and the result of each variant."""
    baseline, period = outcome["baseline"], outcome["evaluation_period"]
    lines = [f"Target loss: {outcome['target_loss']:.4f}, the last loss of {baseline} ({outcome['smoothing']}); "
             f"evaluated every {period} steps, so no speed-up is finer than that."]
    lines += [f"Not equal: {remark}" for remark in outcome["not_equal"]]
    num_tests = sum(variant["p_value"] is not None for variant in outcome["variants"])
    for variant in outcome["variants"]:
        if variant["name"] == baseline:
            continue
        lines.append(_difference(variant, baseline, num_tests))
        if variant["speedup_steps"] is None:
            lines.append(f"{variant['name']} does not get there: it ends at {variant['final_loss']:.4f}.")
        else:
            lines.append(f"{variant['name']} gets there {_in_steps_and_time(variant)}{_range(variant)}.")
        lines += filter(None, [distilled.sentence(variant, baseline)])
    return lines


def _difference(variant, baseline, num_tests):
    """Returns a sentence about the difference of final losses and its significance."""
    mean, smallest = variant["loss_over_baseline"], variant["smallest_effect"]
    line = (f"{variant['name']} ends {abs(mean):.4f} {'above' if mean > 0 else 'below'} {baseline}" if mean else
            f"{variant['name']} ends level with {baseline}")
    if smallest is None:
        few = "one seed does" if len(variant["seeds"]) == 1 else f"seeds that {baseline} was not trained with do"
        return f"{line}; {few} not say how much of that is chance."
    by_seed = ", ".join(f"{seed['loss_over_baseline']:+.4f}" for seed in variant["seeds"])
    is_found, shown = variant["p_value"] < 0.05, f"= {variant['p_value']:.2g}"
    if variant["p_value"] < 0.001:
        shown = "< 0.001"
    holm = f", by Holm's method for {num_tests} variants," if num_tests > 1 else ""
    return (f"{line} ({by_seed} by seed), which is {'more' if is_found else 'no more'} than chance may do "
            f"(p {shown}): what {len(variant['seeds'])} seeds can tell here with 95 % certainty"
            f"{holm} is {smallest:.4f}.")


def _in_steps_and_time(variant):
    """Returns text such as "1.27 times later in steps and 1.10 times sooner in time"."""
    in_steps, in_time = variant["speedup_steps"], variant["speedup_time"]
    is_alike = (in_steps >= 1) == (in_time >= 1)
    return (f"{_factor(in_steps):.2f} times {_side(in_steps)} in steps and {_factor(in_time):.2f} times "
            f"{'' if is_alike else _side(in_time) + ' '}in time")


def _side(speedup):
    return "sooner" if speedup >= 1 else "later"


def _factor(speedup):
    """Returns the factor by which a variant is sooner, or later."""
    return speedup if speedup >= 1 else 1 / speedup


def _range(variant):
    seeds = variant["seeds"]
    if len(seeds) == 1:
        return ""
    steps = ["never" if seed["speedup_steps"] is None else f"{_factor(seed['speedup_steps']):.2f}" + (
        " later" if seed["speedup_steps"] < 1 else "") for seed in seeds]
    return f" (the median of {len(seeds)} seeds: {', '.join(steps)} in steps)"


def times(speedup: float | None) -> str:
    """Formats a speed-up for a table: "1.82x", "1.27x later", "never" if the target is not reached."""
    if speedup is None:
        return "never"
    return f"{_factor(speedup):.2f}x" + (" later" if speedup < 1 else "")


def _row(variant):
    return (variant["name"], str(variant["num_experts"]), f"{variant['num_parameters']:,}",
            f"{variant['flops_per_token']:,.0f}", f"{variant['router_flops_share']:.1%}",
            f"{variant['capacity_padding_share']:.1%}",
            f"{variant['seconds_per_step']:.4f} ({variant['step_time_over_dense']:.2f}x)",
            f"{variant['final_loss']:.4f}", times(variant["speedup_steps"]), times(variant["speedup_time"]))


def _page(curves, outcome, picture):
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(entry)}</td>' for entry in _row(variant))}</tr>"
                   for variant in outcome["variants"])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in words(outcome))
    targets = "".join(
        f"<tr><td>{html.escape(variant['name'])}</td>" + "".join(
            f"<td>{times(target['speedup_steps'])}, {times(target['speedup_time'])}</td>"
            for target in variant["targets"]) + "</tr>" for variant in outcome["variants"])
    heads = "".join(f"<th>{target['loss']:.4f}</th>" for target in outcome["variants"][0]["targets"])
    tasks = "".join(
        f"<tr><td>{html.escape(task)}</td><td>{html.escape(variant['name'])}</td><td>{entry['final_loss']:.4f}</td>"
        f"<td>{times(entry['speedup_steps'])}</td><td>{times(entry['speedup_time'])}</td></tr>"
        for task in outcome["variants"][0]["tasks"] for variant in outcome["variants"]
        if (entry := variant["tasks"].get(task)))
    if tasks:
        tasks = ("<h2>By task</h2><table><tr><th>task</th><th>variant</th><th>final loss</th><th>speed-up in steps</th>"
                 f"<th>speed-up in time</th></tr>{tasks}</table>")
    runs = "".join(f"<tr><td>{html.escape(run.name)}</td><td>{run.seed}</td><td>{html.escape(str(run.folder))}</td>"
                   "</tr>" for run in curves)
    baseline = html.escape(outcome["baseline"])
    return page.page("Dense against sparse", f"<style>{_STYLE}</style>{sentences}<table><tr>{head}</tr>{rows}</table>"
                     f"{page.image('curves', picture)}"
                     f"<h2>Speed-up over {baseline} to several target losses (in steps, in time)</h2>"
                     f"<table><tr><th>variant</th>{heads}</tr>{targets}</table>"
                     f"<p>{html.escape(outcome['work'])} {_WORDS}</p>{tasks}"
                     f"<h2>Runs</h2><table><tr><th>variant</th><th>seed</th><th>folder</th></tr>{runs}</table>")
