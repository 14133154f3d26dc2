"""The clock against the compiler's final schedule: the least time of each part of a step on the core.

    export LIBTPU_INIT_ARGS="--xla_jf_dump_to=BUNDLES --xla_jf_dump_llo_text=true \\
      --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    switch-tf compile ... --json --save FOLDER > ANSWER.json
    .venv/bin/python benchmarks/tpu/schedule.py ANSWER.json FOLDER BUNDLES

`switch-tf compile` uses the cycles that the compiler estimates for an operation. Then the compiler schedules it: a core
takes at least a cycle for each bundle of instructions, and at least the time of its memory traffic at nominal
bandwidth. Operations with loops that cannot be read have a column of their own.
"""

import argparse
import collections
import json
import pathlib
import sys

import bundles
import saved_step

from switch_tf.aot import hlo
from switch_tf.hardware import chips

COLUMNS = ("clock", "bundles", "memory", "at least", "not scheduled")


def main():
    """Reads the schedules and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    saved_step.add_arguments(parser)
    parser.add_argument("bundles", type=pathlib.Path, help="folder of the compiler's schedules")
    arguments = parser.parse_args()
    answer = arguments.answer
    chip, issued = chips.find_chip(answer["topology"]), bundles.read(arguments.bundles)
    points = [_by_part(*saved_step.program(arguments.folder, depth), issued, chip)
              for depth in answer["compiled_layers"]]
    found = {column: saved_step.of_all_layers(answer, [point[column] for point in points]) for column in COLUMNS}
    print(json.dumps({"benchmark": "tpu_schedule", "topology": answer["topology"], "seconds": found}))
    print(_table(found), file=sys.stderr)


def _by_part(module, origins, issued, chip):
    """Returns column -> part -> seconds of a step."""
    found = {column: collections.Counter() for column in COLUMNS}
    scheduled = bundles.of_module(module, issued)
    for computation, instructions in module.computations.items():
        for one in instructions:
            times, part = module.times.get(computation, 0), origins[one.name][0]
            clock = times * (one.cycles or 0) / chip.clock
            if one.name not in scheduled:
                found["not scheduled"][part] += clock
                continue
            core = times * scheduled[one.name] / chip.clock
            # An operation that reads a part of what it is given moves less than all of it.
            memory = min(clock, times * _bytes(module, one) / chip.memory_bandwidth)
            for column, seconds in zip(COLUMNS, (clock, core, memory, max(core, memory)), strict=False):
                found[column][part] += seconds
    return found


def _bytes(module, instruction):
    """Returns the bytes of its operands and result in the chip's memory."""
    shapes = [instruction.shape, *(module.instructions[name].shape for name in set(instruction.operands)
                                   if name in module.instructions)]
    return sum(array.bytes for shape in shapes for array in hlo.arrays(shape) if not array.is_on_chip)


def _table(found):
    """Returns a Markdown table in ms."""
    parts = sorted(set().union(*found.values()), key=lambda part: -found["clock"].get(part, 0.0))
    rows = [["ms", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    rows += [[part, *(f"{1e3 * found[column].get(part, 0.0):.1f}" for column in COLUMNS)] for part in parts]
    rows.append(["the core", *(f"{1e3 * sum(found[column].values()):.1f}" for column in COLUMNS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
