"""Text of the answers of `switch-tf compile`: one in full, several as a table."""

import sys

from switch_tf.aot.attribution import SENT, WAITING
from switch_tf.aot.search import Choice

GIB, MIB = 2**30, 2**20
NUM_KINDS = 4  # kinds of operations that are named
SMALLEST_CHANGE = 0.01  # of a step, in a comparison of two answers
# By what the time was counted by.
HEADINGS = {
    "cycles": "Predicted, not measured, by the compiler's own cycles (docs/compile.md has the assumptions), ms:",
    "rates": "At least, not measured, by nominal rates for the products and bytes of each operation, ms:"}
PARTS = ("core", SENT, WAITING)


def say(text: str) -> None:
    """Prints progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def describe(result: dict) -> str:
    """Returns the text of one answer in full."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    layers, compiled = result["layers"], result["compiled_layers"]
    depths = " and ".join(f"{encoder} + {decoder}" for encoder, decoder in compiled)
    how = f"{layers[0]} + {layers[1]} layers "
    how += "compiled whole" if compiled == [layers] else f"extrapolated from {depths}"
    lines = [f"{result['num_parameters']:,} parameters on {result['topology']}, mesh {mesh}; {how}."]
    if "bytes_per_device" in result:
        lines += _numbers(result)
    else:
        lines.append(f"With {depths} layers the compiler refuses already: {result['refused']}")
    lines.append("It fits." if result["fits"] else "It does not fit.")
    return "\n".join(lines + [f"  {line}" for line in result["advice"]])


def _numbers(result):
    memory = result["bytes_per_device"]
    lines = ["Memory of one chip, GiB:"]
    lines += [f"  {name:<38}{value / GIB:>8.3f}" for name, value in (
        ("weights", memory["weights"]), ("optimizer slots", memory["slots"]),
        ("batch, padding of small arrays", memory["arguments"] - memory["weights"] - memory["slots"]),
        *([("gradients, from function to function", memory["gradients"])] if memory["gradients"] else []),
        ("other results that replace nothing", memory["outputs"] - memory["aliased"] - memory["gradients"]),
        ("activations and temporaries", memory["temporaries"]), ("program", memory["code"]),
        ("needed", memory["needed"]), ("the chip has", result["chip_bytes"]))]
    lines.append("Collectives of a step: count, MiB of results on each chip:")
    lines += [f"  {kind:<20}{entry['count']:>6}{entry['bytes'] / MIB:>12.2f}"
              for kind, entry in sorted(result["collectives"].items())]
    lines.append("The largest of the layers that were compiled:")
    lines += [f"  {entry['bytes'] / MIB:>9.2f} MiB  {entry['kind']} over {' and '.join(entry['axes'])}"
              f"  {entry['shape']}  {entry['where']}" for entry in result["largest_collectives"]]
    return lines + _times(result) + [f"Warning: {warning}." for warning in result["warnings"]]


def _times(result):
    """Returns lines with the predicted time by part and by layer, and the floor."""
    predicted = result["predicted"]
    step, (compute, traffic, links) = predicted["step_seconds"], _roofline(result)
    lines = [HEADINGS[predicted["counted_by"]]]
    lines += [f"  {part:<24}{1e3 * seconds:>10.2f}{seconds / step:>7.1%}" for part, seconds in _longest(
        predicted["parts"])]
    lines += [
        f"  {'a step':<24}{1e3 * step:>10.2f}   {predicted['tokens_per_second']:,.0f} tokens/s, model FLOP utilisation "
        f"{predicted['model_flops_utilization']:.0%}",
        f"  {'no less than':<24}{1e3 * predicted['floor_seconds']:>10.2f}   by nominal rates: compute {compute:.2f}, "
        f"memory {traffic:.2f}, links {links:.2f}"]
    depth = " + ".join(map(str, result["compiled_layers"][-1]))
    lines.append(f"By layer, of the {depth} that were compiled, ms:")
    lines += [f"  {layer:<24}{1e3 * seconds:>10.2f}" for layer, seconds in _longest(predicted["layers"])]
    by_bytes = sum(predicted["seconds_by_bytes"].values())
    kinds = ", ".join(kind for kind, _ in _longest(predicted["seconds_by_bytes"])[:NUM_KINDS])
    if by_bytes and predicted["counted_by"] == "cycles":
        lines.append(f"Of that {1e3 * by_bytes:.2f} ms are of operations for which the compiler names no cycles, and "
                     f"which are counted by their bytes: {kinds}.")
    return lines


def _longest(seconds):
    return sorted(seconds.items(), key=lambda item: -item[1])


def table(results: dict[str, dict]) -> str:
    """Returns answers side by side, in the order given. A refused one has only the key "mistake"."""
    kinds = sorted({kind for result in results.values() for kind in result.get("collectives", ())})
    header = ["", "GiB a chip", "fits", *(f"{kind}s" for kind in kinds), *(f"{name} ms" for name in PARTS), "floor ms",
              "step ms", "tokens/s", "MFU"]
    rows = [header]
    notes = []
    for name, result in results.items():
        if "predicted" not in result:
            rows.append([name, "", "no"] + [""] * (len(header) - 3))
            notes.append(f"{name}: {result.get('mistake') or result['refused']}")
            continue
        predicted = result["predicted"]
        rows.append([
            name, f"{result['bytes_per_device']['needed'] / GIB:.2f}", "yes" if result["fits"] else "no",
            *(str(result["collectives"].get(kind, {"count": 0})["count"]) for kind in kinds),
            *(f"{1e3 * seconds:.1f}" for seconds in _table_parts(predicted)),
            f"{1e3 * predicted['floor_seconds']:.1f}", f"{1e3 * predicted['step_seconds']:.1f}",
            f"{predicted['tokens_per_second']:,.0f}", f"{predicted['model_flops_utilization']:.0%}"])
        notes += [f"{name}: {warning}" for warning in result["warnings"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(
        row[1:], widths[1:], strict=True)]).rstrip() for row in rows]
    return "\n".join(lines + notes)


def ranking(own: Choice, results: dict[Choice, dict], flags: list[str]) -> str:
    """Returns the answers of a search, the flags of the best choice, and its gains over the run's own choice.

    Args:
        own: Choice of the run as it was.
        results: Choice -> answer, the best first.
        flags: Command-line flags of the best choice.
    """
    best, *others = results
    lines = [table({choice.describe(): result for choice, result in results.items()})]
    if results[best].get("fits"):
        lines.append("The best: " + " ".join(flags))
        other = own if best != own and "predicted" in results[own] else next(
            (choice for choice in others if "predicted" in results[choice]), None)
        if other is not None:
            lines.append(f"Against {other.describe()}{' (as it was)' if other == own else ''}: "
                         f"{_why(results[best], results[other])}.")
    return "\n".join(lines)


def _why(winner, other) -> str:
    """Returns the differences between two answers by part."""
    before, after = (result["predicted"]["parts"] for result in (other, winner))
    gains = _longest({part: before.get(part, 0.0) - after.get(part, 0.0) for part in before | after})
    changes = ", ".join(f"{part} {1e3 * before.get(part, 0.0):.1f} -> {1e3 * after.get(part, 0.0):.1f} ms"
                        for part, gain in gains if abs(gain) > SMALLEST_CHANGE * other["predicted"]["step_seconds"])
    return changes or "they take the same"


def _table_parts(predicted):
    """Returns seconds of work on the core, of sending, and of waiting for memory."""
    parts = predicted["parts"]
    idle = [parts.get(name, 0.0) for name in (SENT, WAITING)]
    return predicted["step_seconds"] - sum(idle), *idle


def _roofline(result):
    return tuple(1e3 * result["predicted"][f"{part}_seconds"] for part in ("compute", "memory", "links"))


def flag(binding: str) -> str:
    """Returns the flag of a gin binding, quoted for a shell."""
    name, _, value = binding.partition("=")
    return f'--gin.{name}="{value}"' if "'" in value else f"--gin.{name}={value}"
