"""Large models on the pods that hold them: what the TPU compiler makes of each, and of its dense twin.

    .venv/bin/python benchmarks/scale.py [--output docs/scale.md]

Each is one question to `switch-tf compile`, minutes of compiling; answers are kept, so that a run that was cut off goes
on, and a repeated one is instant. JSON lines go to standard output, progress to standard error, tables and a plot to
--output.
"""

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

import scale_page
import scale_plot

from switch_tf.aot import many
from switch_tf.cli import compile as command
from switch_tf.cli import compile_text


class Run(NamedTuple):
    """`model`, `layout`: gin files; `topology`; `bindings`: text of further bindings; `note`: what it is; `is_full`:
    whether all layers are compiled."""

    model: str
    layout: str
    topology: str
    bindings: tuple[str, ...]
    note: str
    is_full: bool = False


RUNS = (
    Run("switch_base_128", "pod_256", "v5e:16x16", ("BATCH_SIZE=1024",), "Switch-Base, 128 experts"),
    Run("switch_large_128", "pod_256", "v5e:16x16", ("BATCH_SIZE=2048",), "Switch-Large, 128 experts"),
    Run("switch_xxl_128", "pod_512", "v5p:8x8x8", ("BATCH_SIZE=2048",), "Switch-XXL, 128 experts"),
    Run("switch_c_2048", "pod_512_experts", "v5p:8x8x8", ("BATCH_SIZE=2048",), "Switch-C, 2048 experts"),
    Run("gshard_600b", "expert", "v4:8x16x16", ("BATCH_SIZE=8192",), "GShard, 2048 experts, top-2"))
YARDSTICK = Run(
    "dense_encoder_500b", "fully_sharded_model", "v4:8x16x16",
    ("MESH_SHAPE='data=32,model=64'", "BATCH_SIZE=448", "TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 512}"),
    "dense encoder",
    is_full=True)  # with few layers the compiler has room, and keeps more of each than it can of all


def words(run: Run, *more: str) -> list[str]:
    """The command line after "switch-tf compile", with `more` bindings."""
    files = [f"models/{run.model}", "tasks/c4", "runs/pretrain", f"layouts/{run.layout}"]
    return [*(f"--gin_file=gin/{file}.gin" for file in files), f"--topology={run.topology}",
            *(["--full"] if run.is_full else []), *(f"--gin.{binding}" for binding in (*run.bindings, *more))]


def main():
    """Asks everything and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE",
                        help="write the page there, as docs/scale.md, and the plot as images/scale.png beside it")
    arguments = parser.parse_args()
    questions = {}
    for run in RUNS:
        questions[run.note] = words(run)
        questions[_twin(run)] = words(run, "NUM_EXPERTS=0")
    questions[YARDSTICK.note] = words(YARDSTICK)
    found = many.ask({name: command.process(asked) for name, asked in questions.items()}, compile_text.say)
    for name, result in found.items():
        print(json.dumps({"benchmark": "scale", "name": name, **result}))
    if refused := {name: result for name, result in found.items() if "predicted" not in result}:
        raise SystemExit(f"No answer: {refused}")
    if arguments.output:
        sparse = [(run.note, found[run.note], found[_twin(run)]) for run in RUNS]
        commands = [" ".join(["switch-tf compile", *map(_quoted, words(run))]) for run in (*RUNS, YARDSTICK)]
        image = arguments.output.parent / "images" / "scale.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        scale_plot.draw(found, image)
        arguments.output.write_text(scale_page.page(sparse, (YARDSTICK.note, found[YARDSTICK.note]), commands))
        print(f"Written: {arguments.output}, {image}", file=sys.stderr)


def _twin(run):
    return f"{run.note}, dense twin"


def _quoted(word):
    return f'"{word}"' if any(mark in word for mark in "'{ ") else word


if __name__ == "__main__":
    main()
