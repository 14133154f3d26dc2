"""Large models and their dense twins, compiled for the pods that hold them.

    .venv/bin/python benchmarks/tpu/scale.py [--output docs/scale.md]

Each is one question to `switch-tf compile`, minutes of compiling. Answers are cached, so an interrupted run resumes and
a repeated one is instant. JSON lines go to standard output, progress to standard error, tables and a plot to --output.
"""

import argparse
import itertools
import json
import pathlib
import sys
import textwrap
from typing import NamedTuple

import scale_page
import scale_plot

from switch_tf.aot import answers
from switch_tf.cli import compile as command


class Run(NamedTuple):
    """One model on one pod.

    Attributes:
        model, layout: Names of gin files.
        topology: Name of the pod.
        bindings: Further gin bindings.
        note: Name in the tables.
        flags: Flags of the compiler.
        is_full: Whether all layers are compiled.
    """

    model: str
    layout: str
    topology: str
    bindings: tuple[str, ...]
    note: str
    flags: str = ""
    is_full: bool = False


# See docs/compile.md for the reasons.
WHOLE_EINSUMS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
ON_SPARSE_CORES = " ".join((
    WHOLE_EINSUMS, "--xla_tpu_use_tc_device_shape_on_sc=true", "--xla_sc_enable_instruction_fusion=false",
    "--xla_sc_disjoint_spmem=false", "--xla_sc_disable_megacore_partitioning=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=false", *(
        f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true"
        for kind in ("all_gather", "reduce_scatter", "all_reduce"))))
RUNS = (
    Run("switch_base_128", "pod_256_experts", "v5e:16x16",
        ("BATCH_SIZE=2048", "SwitchConfig.num_groups_multiple=256"), "Switch-Base, 128 experts", WHOLE_EINSUMS),
    Run("switch_large_128", "pod_256_experts", "v5e:16x16",
        ("BATCH_SIZE=2048", "SwitchConfig.num_groups_multiple=256"), "Switch-Large, 128 experts", WHOLE_EINSUMS),
    Run("switch_xxl_128", "pod_512_fully_sharded", "v5p:8x8x8",
        ("BATCH_SIZE=2048", "SwitchConfig.num_groups_multiple=512"), "Switch-XXL, 128 experts", ON_SPARSE_CORES),
    Run("switch_c_2048", "pod_512_experts", "v5p:8x8x8", ("BATCH_SIZE=2048",), "Switch-C, 2048 experts",
        ON_SPARSE_CORES),
    Run("gshard_600b", "expert", "v4:8x16x16", ("BATCH_SIZE=8192",), "GShard, 2048 experts, top-2"))
YARDSTICK = Run(
    "dense_encoder_500b", "fully_sharded_model", "v4:8x16x16",
    ("MESH_SHAPE='data=32,model=64'", "BATCH_SIZE=384", "TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 512}"),
    "dense encoder",
    is_full=True)  # with few layers the compiler has room and keeps more per layer than it could for all


def words(run: Run, *more: str) -> list[str]:
    """Returns the command line after "switch-tf compile", with `more` bindings."""
    files = [f"models/{run.model}", "tasks/c4", "runs/pretrain", f"layouts/{run.layout}"]
    return [*(f"--gin_file=gin/{file}.gin" for file in files), f"--topology={run.topology}",
            *(["--full"] if run.is_full else []), *(f"--gin.{binding}" for binding in (*run.bindings, *more))]


def process(run: Run, *more: str) -> list[str]:
    """Returns the command of a process with the compiler's flags."""
    return ["env", f"LIBTPU_INIT_ARGS={run.flags}", *command.process(words(run, *more))]


def main():
    """Compiles everything and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE",
                        help="write the page there, as docs/scale.md, and the plot as images/scale.png beside it")
    arguments = parser.parse_args()
    questions = {YARDSTICK.note: process(YARDSTICK)}  # the longest first
    for run in RUNS:
        questions[run.note] = process(run)
        questions[_twin(run)] = process(run, "NUM_EXPERTS=0")
    found = answers.ask(questions)
    for name, result in found.items():
        print(json.dumps({"benchmark": "scale", "name": name, **result}))
    if refused := {name: result for name, result in found.items() if "predicted" not in result}:
        raise SystemExit(f"No answer: {refused}")
    if arguments.output:
        sparse = [(run.note, found[run.note], found[_twin(run)]) for run in RUNS]
        commands = [_wrapped(line) for flags, runs in itertools.groupby((*RUNS, YARDSTICK), lambda run: run.flags)
                    for line in (f'export LIBTPU_INIT_ARGS="{flags}"', *(
                        " ".join(["switch-tf compile", *map(_quoted, words(run))]) for run in runs))]
        image = arguments.output.parent / "images" / "scale.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        scale_plot.draw(found, image)
        arguments.output.write_text(scale_page.page(sparse, (YARDSTICK.note, found[YARDSTICK.note]), commands))
        print(f"Written: {arguments.output}, {image}", file=sys.stderr)


def _twin(run):
    return f"{run.note}, dense twin"


def _wrapped(command):
    lines = textwrap.wrap(command, 117, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


def _quoted(word):
    return f'"{word}"' if any(mark in word for mark in "'{ ") else word


if __name__ == "__main__":
    main()
