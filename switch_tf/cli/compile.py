"""`switch-tf compile` and `verify-layout`: a layout's cost on a pod or on GPUs, and its effect on a step."""

import contextlib
import json
import sys
import tempfile
from argparse import Namespace

from etils import epy

from switch_tf.aot import answers, search
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
from switch_tf.hardware import chips
from switch_tf.installation.doctor import check_gpu_compiler, check_tpu_compiler
from switch_tf.partitioning import collectives
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, outputs

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import experiments
    from switch_tf.aot import compiler, estimate
    from switch_tf.training import verification

COMPILE_EXAMPLES = r"""
switch-tf compile switch_base_8 c4 data --topology=v5e:2x4
switch-tf compile switch_base_8 c4 --topology=v5e:2x4 --compare=data,expert
"""
COMPILE_ARGUMENTS = (
    *options.GIN,
    *options.run_macros(),
    option("--topology",
           "the pod, as libtpu calls it: v5e:4x4, v6e:16x16, v5p:4x4x4, tpu7x:2x2x1 ...; or GPUs: h100:8, a "
           "server of 8, h100:2x8, two of them, and a100 and h200. Also v5litepod-8 and a100-80gb:8", "NAME",
           required=True),
    option("--full", "compile all layers; otherwise two shallow depths, from which the rest is extrapolated"),
    option("--save",
           "keep the StableHLO, the optimised HLO and the schedule there, as a trace for Perfetto", "FOLDER"),
    option("--plot", "draw the schedule and the time of each part, as PNG", "FILE"),
    option("--compare",
           "layouts to put side by side, separated by commas: names such as expert,expert_model, or gin files",
           "LAYOUTS"),
    option("--search", "try meshes, group sizes and capacity factors, and rank them by predicted time"),
)


def run_compile(arguments: Namespace) -> dict:
    """Prints memory, collectives and times of one chip. Returns the JSON object. Status 1 means that nothing fits.

    Computes in bfloat16 unless ACTIVATION_DTYPE is set. Reads no data, vocabulary or network.
    """
    arguments.topology = chips.full_name(arguments.topology)
    kind = chips.kind(arguments.topology)
    (check_gpu_compiler if kind == "GPU" else check_tpu_compiler)()
    keeps = bool(arguments.save or arguments.plot)
    if (arguments.compare is not None) + arguments.search + keeps > 1:
        raise Refusal("--compare and --search do not go with each other, nor with --save and --plot; give one of them.")
    answers.check_outputs(arguments.save, arguments.plot)

    def check(described):
        backend = described.layout.backend
        if backend == "dtensor" or backend not in ("auto", "pjrt") and kind == "GPU":
            raise Refusal(f"For {kind}s the program of the pjrt back end is compiled, not that of {backend!r}; use "
                          "backend='pjrt', or leave Layout.backend out.")

    described = options.load(arguments, ["MODEL_DIR='unused'", "ACTIVATION_DTYPE='bfloat16'"], check=check)
    if kind == "TPU":
        chips.set_compiler_flags(arguments.topology)
    if arguments.compare is not None:
        return _compare(described, arguments)
    if described.layout.is_auto:
        if arguments.search:
            raise Refusal("--search starts from a layout; name one, such as --gin_file=gin/layouts/expert.gin.")
        described = _place_on_topology(described, arguments.topology)
    if arguments.search:
        return _search(described, arguments)
    file = answers.cache_file(described.gin.text(), arguments.topology, str(arguments.full))
    answer, files = None, {}
    with contextlib.suppress(ValueError, OSError):  # absent or damaged
        answer = None if keeps else json_lines.load(file)
    if answer:
        outputs.say(f"The compiler was asked before; its answer is {file}.")
        print(answers.describe(answer))
    else:
        answer, files = estimate.answer(_place_on_topology(described, arguments.topology), arguments.topology,
                                        arguments.full, arguments.save, arguments.plot)
        # Printed first: a full disk loses no answer.
        print(answers.describe(answer))
        answers.write(file, json.dumps(answer))
    is_saved = all(answers.write(path, content) for path, content in files.items())
    return {**answer, "exit_status": int(not (answer["fits"] and is_saved))}


def _place_on_topology(described, topology):
    chips.find_chip(topology)  # before the compiler starts
    with outputs.held_back():  # libtpu prints that there is no TPU
        num_devices = len(compiler.devices_of(topology))
    # A search looks for what fits; `estimate` checks.
    return experiments.place_on_devices(described, num_devices, chips.kind(topology), is_checked=False)


def _compare(described, arguments):
    if not described.layout.is_auto:
        raise Refusal("--compare names the layouts, so leave out the layout's --gin_file.")
    files = {name: name if name.endswith(".gin") else f"gin/layouts/{name}.gin"
             for name in filter(None, arguments.compare.split(","))}
    if len(files) < 2:
        raise Refusal(f"--compare needs at least two layouts, as in --compare=expert,expert_model, not "
                      f"{arguments.compare!r}.")
    outputs.say(f"Compiling {len(files)} layouts ...")
    results = _ask(arguments, {name: [f"--gin_file={file}"] for name, file in files.items()})
    print(answers.table(results))
    return {"layouts": results, "exit_status": int(not any(answer.get("fits") for answer in results.values()))}


def _search(described, arguments):
    mesh_name = "MESH_SHAPE" if "MESH_SHAPE" in described.gin.macros else "Layout.mesh_shape"
    described = _place_on_topology(described, arguments.topology)
    has_experts = bool(described.config.num_experts)

    def ask(choices):
        return _ask(arguments, {name: [f"--gin.{binding}" for binding in choice.bindings(mesh_name, has_experts)]
                                for name, choice in choices.items()})

    current, results = search.search(described, ask)
    best = next(iter(results))
    print(search.ranking(current, results, best.bindings(mesh_name, has_experts)))
    return {"candidates": [{**choice._asdict(), **answer} for choice, answer in results.items()],
            "exit_status": int(not results[best].get("fits"))}


def _ask(arguments, questions):
    """Compiles for each name with its additional words."""
    words = [sys.executable, "-m", "switch_tf.cli", "compile", "--json", *options.gin_words(arguments),
             f"--gin_search_paths={arguments.gin_search_paths}", f"--topology={arguments.topology}",
             *["--full"] * arguments.full]
    return answers.ask({name: [*words, *more] for name, more in questions.items()})


VERIFY_LAYOUT_EXAMPLES = r"""
switch-tf verify-layout switch_tiny docs_corpus expert --batch_size 16
switch-tf verify-layout demo data --devices 4
"""
VERIFY_LAYOUT_ARGUMENTS = (
    *options.GIN,
    *options.run_macros("steps"),
    *options.device_options(8),
    count("--steps", "training steps to compare (default 3)", 3),
)


def run_verify_layout(arguments: Namespace) -> tuple[dict, str]:
    """Returns the largest differences and the collectives, as JSON and as text. Status 1 means that they are too large.

    Computes in float64 unless ACTIVATION_DTYPE is set.
    """
    with tempfile.TemporaryDirectory() as dumps:
        collectives.dump_partitioned_programs(dumps)
        described = options.load(arguments, ["MODEL_DIR='unused'", "ACTIVATION_DTYPE='float64'"], arguments.devices)
        return verification.verify(experiments.place_here(described, num_cpus=arguments.devices), arguments.steps,
                                   dumps)
