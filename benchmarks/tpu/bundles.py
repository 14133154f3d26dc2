"""The compiler's final schedule: how many instruction words, "bundles", the core issues for each operation.

A TPU's core issues one bundle a cycle at most, in order. So the bundles of an operation are the least that it takes, as
far as it does not wait for memory. The compiler writes them to files where it is asked for them (`flags`).
"""

import pathlib
import re

from switch_tf.aot import hlo

_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*([> ]*)")
_ROUNDS = re.compile(r"scmp\.ge\.s32\.totalorder %\S+, (\d+) /\* loop exit test \*/")
_NAME = re.compile(r"%[\w.\-]+")


def flags(folder) -> str:
    """What LIBTPU_INIT_ARGS has to hold for the schedules of all that is compiled to be written to a folder."""
    return (f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*")


def read(folder: pathlib.Path) -> dict[str, int]:
    """What the core issues, once, for each operation whose loops are known.

    Args:
        folder: that of `flags`; of several programs, if they were compiled with it.

    Returns:
        XLA's text of an operation up to its operands' end -> bundles.
    """
    found = {}
    for file in folder.glob("*-final_bundles.txt"):
        name = _FILE.fullmatch(file.name)
        if name is None or "-schedule-analysis_" in file.name:
            continue
        analysis, = folder.glob(f"{file.name.partition('-')[0]}-{name[1]}-*-schedule-analysis_final_bundles.txt")
        told = re.search(rf"%{re.escape(name[1])} = .*", analysis.read_text())
        issued = count(file.read_text())
        if told and issued is not None:
            found[_head(told[0])] = issued
    return found


def count(text: str) -> int | None:
    """Bundles of an operation, those of a loop as often as it runs; None where that is not written."""
    totals, depths = [0], [0]
    for line in text.splitlines():
        if not (bundle := _BUNDLE.match(line)):
            continue
        is_body, depth = bundle[1] == "LB", bundle[2].count(">")
        if is_body:
            totals.append(0)
            depths.append(depth)
        totals[-1] += 1
        if "/* loop exit test */" in line:
            rounds = _ROUNDS.search(line)
            if rounds is None or depth != depths.pop():
                return None
            inner = totals.pop()
            totals[-1] += inner * int(rounds[1])
    return totals[0] if len(totals) == 1 else None


def of_module(module: hlo.Module, issued: dict[str, int]) -> dict[str, int]:
    """Name of an operation -> its bundles. The compiler schedules one of several that are equal; they all have its."""
    texts = {name: issued.get(_head(one.line)) for name, one in module.instructions.items()}
    alike = {}
    for name, bundles in texts.items():
        if bundles is not None:
            alike.setdefault(_likeness(module, name), bundles)
    return {name: bundles for name, one in module.instructions.items() if one.cycles is not None
            and (bundles := texts[name] or alike.get(_likeness(module, name))) is not None}


def _head(line):
    """"%name = shape kind(operands" of an operation."""
    return re.search(r"%\S+ = .*? [a-z][\w-]*\([^)]*", line)[0]


def _likeness(module, name):
    """The same for operations that differ in names alone."""
    one = module.instructions[name]
    lines = [one.line, *(inner.line for body in one.called.get("calls", ()) for inner in module.computations[body])]
    numbers = {}
    text = "\n".join(re.split(r", (?:metadata|backend_config)=", line)[0].strip().removeprefix("ROOT ")
                     for line in lines)
    shapes = [module.instructions[operand].shape for operand in one.operands if operand in module.instructions]
    return _NAME.sub(lambda found: f"%{numbers.setdefault(found[0], len(numbers))}", text), tuple(shapes)
