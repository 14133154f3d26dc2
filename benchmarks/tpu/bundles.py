"""Number of instruction words ("bundles") of each operation in the compiler's final schedule.

A TPU's core issues at most one bundle per cycle, in order, so bundles are the least time of an operation that does not
wait for memory. The compiler writes them to files if `flags` are set.
"""

import pathlib
import re

from switch_tf.aot import hlo

_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*([> ]*)")
_ROUNDS = re.compile(r"scmp\.ge\.s32\.totalorder %\S+, (\d+) /\* loop exit test \*/")
_NAME = re.compile(r"%[\w.\-]+")


def flags(folder) -> str:
    """Returns the LIBTPU_INIT_ARGS that make the compiler write all schedules to a folder."""
    return (f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*")


def read(folder: pathlib.Path) -> dict[str, int]:
    """Reads the bundles of each operation with known loops.

    Args:
        folder: Folder of `flags`, for one or more programs.

    Returns:
        XLA's text of an operation up to the end of its operands -> bundles.
    """
    bundles = {}
    for file in folder.glob("*-final_bundles.txt"):
        name = _FILE.fullmatch(file.name)
        if name is None or "-schedule-analysis_" in file.name:
            continue
        analysis, = folder.glob(f"{file.name.partition('-')[0]}-{name[1]}-*-schedule-analysis_final_bundles.txt")
        line = re.search(rf"%{re.escape(name[1])} = .*", analysis.read_text())
        issued = count(file.read_text())
        if line and issued is not None:
            bundles[_head(line[0])] = issued
    return bundles


def count(text: str) -> int | None:
    """Counts the bundles of an operation, loops as often as they run. None if a loop's rounds are not in the text."""
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
    """Returns name of an operation -> bundles. Of several equal operations the compiler schedules only one."""
    texts = {name: issued.get(_head(instruction.line)) for name, instruction in module.instructions.items()}
    alike = {}
    for name, bundles in texts.items():
        if bundles is not None:
            alike.setdefault(_likeness(module, name), bundles)
    return {name: bundles for name, instruction in module.instructions.items() if instruction.cycles is not None
            and (bundles := texts[name] or alike.get(_likeness(module, name))) is not None}


def _head(line):
    """Returns "%name = shape kind(operands" of an operation."""
    return re.search(r"%\S+ = .*? [a-z][\w-]*\([^)]*", line)[0]


def _likeness(module, name):
    """Returns a key that is equal for operations that differ only in names."""
    instruction = module.instructions[name]
    lines = [instruction.line, *(inner.line for body in instruction.called.get("calls", ())
                                 for inner in module.computations[body])]
    numbers = {}
    text = "\n".join(re.split(r", (?:metadata|backend_config)=", line)[0].strip().removeprefix("ROOT ")
                     for line in lines)
    shapes = [module.instructions[operand].shape for operand in instruction.operands if operand in module.instructions]
    return _NAME.sub(lambda found: f"%{numbers.setdefault(found[0], len(numbers))}", text), tuple(shapes)
