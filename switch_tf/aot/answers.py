"""The compiler's answers, as JSON objects: cache, processes and text. Imports no TensorFlow."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time

import switch_tf
from switch_tf import environment
from switch_tf.aot.hlo import SENT, WAITING
from switch_tf.hardware import chips, host
from switch_tf.refusals import Refusal
from switch_tf.reporting.report import align_columns
from switch_tf.storage import outputs, places
from switch_tf.storage.whole_file import write_whole, writing

_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", *chips.SHARE_VARIABLES)
# Bytes, enough for usual widths.
MEMORY_OF_A_JOB = 8 * 2**30
GIB, MIB = 2**30, 2**20
NUM_KINDS = 4  # kinds of operations to list
# By `counted_by`.
HEADINGS = {
    "cycles": "Predicted, not measured, by the compiler's own cycles (docs/compile.md has the assumptions), ms:",
    "rates": "At least, not measured, by nominal rates for the products and bytes of each operation, ms:"}


def cache_file(*question: str) -> pathlib.Path:
    """Returns the cache file of a question: configuration, topology, depth. Depends on compiler, flags and package."""
    key = hashlib.sha256()
    packages = ("tensorflow", "keras", "jaxlib", "libtpu", environment.cuda_plugin())
    versions = [f"{name}={environment.installed_version(name)}" for name in packages if name]
    for text in (*question, *versions, *(os.environ.get(flags, "") for flags in _FLAGS)):
        key.update(text.encode())
    for file in sorted(pathlib.Path(switch_tf.__file__).parent.rglob("*.py")):
        key.update(file.read_bytes())
    return environment.cache_folder() / "compiled" / f"{key.hexdigest()[:24]}.json"


def write(file: pathlib.Path, content: str | bytes) -> bool:
    """Writes a whole file atomically. Returns False and prints the reason if it cannot be written."""
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except Refusal as refusal:
        outputs.say(f"{refusal} Only what is printed here is kept.")
        return False
    return True


def check_outputs(save: str | None, plot: str | None) -> None:
    """Refuses a `--save` folder or `--plot` file that cannot be written. Creates the folders."""
    if plot is not None and places.at(plot).is_dir():
        raise Refusal(f"--plot needs a file, and {plot!r} is a folder; name one in it, such as step.png.")
    for flag, folder in (("--save", save is not None and places.at(save)),
                         ("--plot", plot is not None and places.at(plot).parent)):
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
            if folder and places.is_local(folder):
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise Refusal(f"{flag} needs a folder that can be written to, and {str(folder)!r} is none "
                          f"({error.strerror}); name another.") from error


def ask(questions: dict[str, list[str]]) -> dict[str, dict]:
    """Runs a process for every question, as cores and memory allow, and prints a line after each.

    Args:
        questions: Name -> command. Its last line of output is an answer, or it exits with status 2 and a message.

    Returns:
        Name -> answer, or {"mistake": sentence} for a refused question.

    Raises:
        RuntimeError: A process failed.
    """
    started, answers, running = time.perf_counter(), {}, set()

    def run(command):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.add(process)
        output, error = process.communicate()
        running.discard(process)
        if output:
            return json.loads(output.splitlines()[-1])
        last = (error.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
        if process.returncode != 2:
            raise RuntimeError(f"`{' '.join(command)}` failed: {error[-4000:]}")
        return {"mistake": re.sub(r"^switch-tf [\w-]+: ", "", last)}

    # Includes the page cache, unlike free memory.
    memory = host.memory("MemAvailable")
    workers = max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_A_JOB, len(questions)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(run, command): name for name, command in questions.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                name = futures[future]
                answer = answers[name] = future.result()
                elapsed = time.perf_counter() - started
                left = elapsed / len(answers) * (len(questions) - len(answers))
                fits = "fits" if answer.get("fits") else "does not fit"
                if "mistake" in answer:
                    fits = f"refused ({answer['mistake']})"
                elif "predicted" in answer:
                    fits = f"{1e3 * answer['predicted']['step_seconds']:.1f} ms a step, {fits}"
                outputs.say(f"[{len(answers)} of {len(questions)}] {name}: {fits}; {elapsed:.0f} s, "
                    + (f"about {left:.0f} s left." if left else "done."))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
    return {name: answers[name] for name in questions}


def describe(answer: dict) -> str:
    """Returns an answer's full text."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in answer["mesh"].items())
    layers, compiled = answer["layers"], answer["compiled_layers"]
    depths = " and ".join(f"{encoder} + {decoder}" for encoder, decoder in compiled)
    how = "compiled whole" if compiled == [layers] else f"extrapolated from {depths}"
    lines = [f"{answer['num_parameters']:,} parameters on {answer['topology']}, mesh {mesh}; {layers[0]} + {layers[1]} "
             f"layers {how}."]
    if "bytes_per_device" in answer:
        lines += _numbers(answer)
    else:
        lines.append(f"With {depths} layers the compiler refuses already: {answer['refused']}")
    lines.append("It fits." if answer["fits"] else "It does not fit.")
    return "\n".join(lines + [f"  {line}" for line in answer["advice"]])


def _numbers(answer):
    memory, predicted = answer["bytes_per_device"], answer["predicted"]
    lines = ["Memory of one chip, GiB:"]
    lines += [f"  {name:<38}{value / GIB:>8.3f}" for name, value in (
        ("weights", memory["weights"]), ("optimizer slots", memory["slots"]),
        ("batch, padding of small arrays", memory["arguments"] - memory["weights"] - memory["slots"]),
        ("other results that replace nothing", memory["outputs"] - memory["aliased"]),
        ("activations and temporaries", memory["temporaries"]), ("program", memory["code"]),
        ("needed", memory["needed"]), ("the chip has", answer["chip_bytes"]))]
    lines.append("Collectives of a step: count, MiB of results on each chip:")
    lines += [f"  {kind:<20}{entry['count']:>6}{entry['bytes'] / MIB:>12.2f}"
              for kind, entry in sorted(answer["collectives"].items())]
    lines.append("The largest of the layers that were compiled:")
    lines += [f"  {entry['bytes'] / MIB:>9.2f} MiB  {entry['kind']} over {' and '.join(entry['axes'])}"
              f"  {entry['shape']}  {entry['where']}" for entry in answer["largest_collectives"]]
    step = predicted["step_seconds"]
    compute, traffic, links = (1e3 * predicted[f"{part}_seconds"] for part in ("compute", "memory", "links"))
    lines.append(HEADINGS[predicted["counted_by"]])
    lines += [f"  {part:<24}{1e3 * seconds:>10.2f}{seconds / step:>7.1%}" for part, seconds in longest(
        predicted["parts"])]
    lines += [
        f"  {'a step':<24}{1e3 * step:>10.2f}   {predicted['tokens_per_second']:,.0f} tokens/s, model FLOP utilisation "
        f"{predicted['model_flops_utilization']:.0%}",
        f"  {'no less than':<24}{1e3 * predicted['floor_seconds']:>10.2f}   by nominal rates: compute {compute:.2f}, "
        f"memory {traffic:.2f}, links {links:.2f}",
        f"By layer, of the {' + '.join(map(str, answer['compiled_layers'][-1]))} that were compiled, ms:"]
    lines += [f"  {layer:<24}{1e3 * seconds:>10.2f}" for layer, seconds in longest(predicted["layers"])]
    by_bytes = sum(predicted["seconds_by_bytes"].values())
    kinds = ", ".join(kind for kind, _ in longest(predicted["seconds_by_bytes"])[:NUM_KINDS])
    if by_bytes and predicted["counted_by"] == "cycles":
        lines.append(f"Of that {1e3 * by_bytes:.2f} ms are of operations for which the compiler names no cycles, and "
                     f"which are counted by their bytes: {kinds}.")
    return lines + [f"Warning: {warning}." for warning in answer["warnings"]]


def longest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Returns a dictionary's items, the largest value first."""
    return sorted(seconds.items(), key=lambda item: -item[1])


def table(answers: dict[str, dict]) -> str:
    """Returns a table of answers. A refused question has only the key "mistake"."""
    kinds = sorted({kind for answer in answers.values() for kind in answer.get("collectives", ())})
    header = ["", "GiB a chip", "fits", *(f"{kind}s" for kind in kinds), "core ms", f"{SENT} ms", f"{WAITING} ms",
              "floor ms", "step ms", "tokens/s", "MFU"]
    rows, notes = [header], []
    for name, answer in answers.items():
        if "predicted" not in answer:
            rows.append([name, "", "no"] + [""] * (len(header) - 3))
            notes.append(f"{name}: {answer.get('mistake') or answer['refused']}")
            continue
        predicted = answer["predicted"]
        sent, waiting = (predicted["parts"].get(part, 0.0) for part in (SENT, WAITING))
        step = predicted["step_seconds"]
        rows.append([
            name, f"{answer['bytes_per_device']['needed'] / GIB:.2f}", "yes" if answer["fits"] else "no",
            *(str(answer["collectives"].get(kind, {"count": 0})["count"]) for kind in kinds),
            *(f"{1e3 * seconds:.1f}" for seconds in (
                step - (sent + waiting), sent, waiting, predicted["floor_seconds"], step)),
            f"{predicted['tokens_per_second']:,.0f}", f"{predicted['model_flops_utilization']:.0%}"])
        notes += [f"{name}: {warning}" for warning in answer["warnings"]]
    return "\n".join(align_columns(rows) + notes)
