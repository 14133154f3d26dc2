"""Accuracy of the extrapolation from two shallow depths: `switch-tf compile` beside `switch-tf compile --full`.

    .venv/bin/python benchmarks/tpu/extrapolation.py

Switch-Base with 8 experts, 12 + 12 layers, on v5e:2x4 under gin/layouts/expert.gin. One JSON line goes to standard
output, the table to standard error.
"""

import json
import sys

from switch_tf.aot import answers
from switch_tf.cli import compile as command

WORDS = ["--gin_file=gin/models/switch_base_8.gin", "--gin_file=gin/tasks/c4.gin", "--gin_file=gin/runs/pretrain.gin",
         "--gin_file=gin/layouts/expert.gin", "--topology=v5e:2x4"]


def numbers(result) -> dict[str, float]:
    """Returns the compared numbers: bytes of memory, FLOPs, seconds by part, and bytes of each kind of collective."""
    memory, predicted = result["bytes_per_device"], result["predicted"]
    return {**{f"bytes: {kind}": memory[kind] for kind in ("arguments", "temporaries", "code", "needed")},
            "FLOPs": result["flops_per_device"],
            **{f"seconds: {part}": predicted[f"{part}_seconds"] for part in ("compute", "memory", "links", "step")},
            **{f"sent: {kind}": entry["bytes"] for kind, entry in sorted(result["collectives"].items())}}


def main():
    """Compiles both and prints the ratios."""
    found = answers.ask({"extrapolated": command.process(WORDS), "whole": command.process([*WORDS, "--full"])})
    extrapolated, whole = numbers(found["extrapolated"]), numbers(found["whole"])
    print(f"{'':<24}{'extrapolated':>16}{'whole':>16}{'ratio':>8}", file=sys.stderr)
    for name, size in whole.items():
        mine = extrapolated.get(name, 0)
        print(f"{name:<24}{mine:>16.6g}{size:>16.6g}{mine / size:>8.3f}", file=sys.stderr)
    print(json.dumps({"benchmark": "extrapolation", "extrapolated": extrapolated, "whole": whole}))


if __name__ == "__main__":
    main()
