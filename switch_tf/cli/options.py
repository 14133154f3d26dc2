"""Arguments that several commands share."""

import contextlib
import itertools
import json
import pathlib
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli.parser import count, option
from switch_tf.configs import experiment, gin_syntax, parts, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.installation import quiet
from switch_tf.partitioning.layout import BACKENDS
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, outputs, places

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import experiments
    from switch_tf.hardware import devices
    from switch_tf.inference import saved_runs


# `main` takes `--gin.NAME=VALUE`.
GIN = (
    option("names",
           "shipped gin files by name, such as switch_tiny docs_corpus expert, and files of your own; a run without a "
           "file of gin/runs is pretrain", "NAME", nargs="*", default=[]),
    option("--gin_file",
           "gin file, repeatable; the one given last wins. Shipped files such as gin/models/switch_tiny.gin are found "
           "from any folder", "FILE", action="append", default=[]),
    option("--gin_search_paths",
           "folders to look for gin files in, separated by commas, before the shipped ones", "FOLDERS", default=""),
    "--gin.NAME=VALUE overrides a macro or a parameter. VALUE is gin syntax, or else text: --gin.MODEL_DIR=runs/x.",
)
_ROOMS = ("models", "tasks", "runs", "layouts")  # read in this order
# Option, macro, metavar, help.
_MACROS = """
    model_dir MODEL_DIR FOLDER the run folder; the same command resumes its run
    steps TRAIN_STEPS N last training step
    batch_size BATCH_SIZE N sequences of a batch
    train_files TRAIN_FILES TEXTS your texts, a path, a glob or a list, for own_text and text_files
    vocabulary VOCABULARY NAME_OR_FILE bytes, docs_corpus, t5, mt5 or a SentencePiece model
    initial_checkpoint INITIAL_CHECKPOINT RUN weights to start from
    learning_rate LEARNING_RATE RATE a number instead of the schedule
    num_experts NUM_EXPERTS N experts of each sparse layer
    mesh_shape MESH_SHAPE MESH sizes of the layout's axes, such as data=4,model=2
    seed SEED N of weights, data and dropout
"""
OUTPUT = option("--output", "a new or empty folder", "FOLDER", required=True)
TRUST = option("--trust",
               "run the gin file of the run even if it names modules that switch_tf does not ship; a gin file is a "
               "program", goes_with="--run; a saved model has no gin file.")


def run_macros(*left_out: str) -> tuple:
    """Declares `--task`, a further NAME, and options for frequent macros. `expand` reads them."""
    return (option("--task", "one more NAME, such as docs_corpus", "NAME"),
            *(option(f"--{name}", f"{macro}: {meaning}", metavar, dest=macro)
              for name, macro, metavar, meaning in (line.split(None, 3) for line in _MACROS.strip().splitlines())
              if name not in left_out))


def gin_words(arguments: Namespace) -> list[str]:
    """Returns the gin files and bindings of a command line in their long form."""
    return [*map("--gin_file={}".format, arguments.gin_file), *map("--gin.{}".format, arguments.gin_bindings)]


def expand(arguments: Namespace) -> None:
    """Turns names and options for macros into gin files and bindings, and prints the result.

    Raises:
        Refusal: A name is unknown, or two files would set the same part of a run.
    """
    bindings = [f"{macro}={value}" for macro, value in vars(arguments).items() if macro.isupper() and value is not None]
    names = [*arguments.names, *filter(None, [getattr(arguments, "task", None)])]
    if arguments.command == "cache" and arguments.teacher and arguments.name:
        names, arguments.name = [arguments.name, *names], None
    if not names and not bindings:
        return
    is_comparison = arguments.command == "compare"
    chosen = {room: [] for room in ("comparisons", *_ROOMS, "own")}
    for name in names:
        file = name if name.endswith(".gin") else shipped_gin.find(
            name, ("comparisons", "models", "tasks", "layouts") if is_comparison else _ROOMS)
        chosen[file.split("/")[1] if file in shipped_gin.names() else "own"].append(file)
    own = chosen.pop("own")
    bound = {file: gin_syntax.read([file], search_paths=arguments.gin_search_paths).names()
             for file in (*own, *arguments.gin_file)}
    if not chosen["models"]:  # a model file of one's own, as `convert` writes it, comes before the run
        chosen["models"] = [file for file in own if {parts.CONFIG, parts.TRAINER} & bound[file] == {parts.CONFIG}][:1]
    has_run = chosen["runs"] or parts.TRAINER in set().union(*bound.values())
    if names and arguments.command in ("train", "compile", "verify-layout") and not has_run:
        chosen["runs"] = ["gin/runs/pretrain.gin"]
    for room, files in chosen.items():
        if len(files) > 1 and not (is_comparison and room == "models"):
            raise Refusal(f"A run has one file of gin/{room}, not {' and '.join(files)}; leave out all but one.")
    for file in (*chosen["comparisons"], *chosen["runs"]):
        for room in re.findall(r"gin/(models|tasks)/", (shipped_gin.folder() / file).read_text()):
            if chosen[room]:
                raise Refusal(f"{file} makes this choice itself: leave out {chosen[room][0]}, or give both with "
                              "--gin_file, where the last one wins.")
    if is_comparison and chosen["models"]:
        bindings = [f"VARIANTS={json.dumps({shipped_gin.stem(file): [file] for file in chosen.pop('models')})}", *(
            f"{room.upper()[:-1]}={file}" for room in ("tasks", "layouts", "runs") for file in chosen.pop(room)),
            *bindings]
        chosen["comparisons"] = ["gin/comparisons/models.gin"]
    files = [*itertools.chain(*chosen.values())]
    arguments.gin_file = [*files, *(file for file in own if file not in files), *arguments.gin_file]
    arguments.gin_bindings = [*bindings, *arguments.gin_bindings]
    if getattr(arguments, "processes", 1) == 1:  # otherwise the first of them prints it
        outputs.say("\n  ".join(["This stands for:", *map(shlex.quote, gin_words(arguments))]))


def device_options(num_devices: int | None = None, goes_with: str = "") -> tuple:
    """Declares `--devices` and `--backend`. `main` turns the latter into a binding."""
    return (count("--devices", f"virtual devices to make of this machine's CPU (default {num_devices or 'as it is'})",
                  num_devices, goes_with=goes_with),
            option("--backend", f"back end that runs the layout: {', '.join(BACKENDS)} (default: Layout.backend of the "
                   "gin files)", "NAME", goes_with=goes_with))


@contextlib.contextmanager
def new_output(arguments: Namespace) -> Iterator[Any]:
    """Yields the locked path of `--output`. Refuses a folder that is not empty."""
    output = places.at(arguments.output)
    checks.new_folder(output)
    with lock.held(output):
        yield output


def look(arguments: Namespace, defaults: Sequence[str] = ()) -> Experiment:
    """Returns a command line's experiment without building it or importing TensorFlow.

    The command line overrides the `defaults`, "NAME=VALUE".
    """
    return Experiment.from_gin(arguments.gin_file, [*defaults, *arguments.gin_bindings], arguments.gin_search_paths)


def load(arguments: Namespace, defaults: Sequence[str] = (), num_cpu_devices: int | None = None,
         check: Callable[[Experiment], Any] = lambda described: None) -> Experiment:
    """Returns a command line's experiment as `look`, and imports TensorFlow if it is valid.

    Args:
        num_cpu_devices: See `quiet.import_tensorflow`.
        check: Refuses an unusable experiment.
    """
    quiet.expect_tensorflow(num_cpu_devices)  # the user's own gin file may import it
    described = look(arguments, defaults)
    described.gin.check_read(arguments.gin_bindings)
    check(described)
    quiet.import_tensorflow(num_cpu_devices)
    return described


def read_model(arguments: Namespace) -> tuple[SwitchConfig, Any]:
    """Returns the model of the gin files, and their Layout or None."""
    files = arguments.gin_file
    gin = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check()
    bound = {name for _, name in gin.bound}
    if parts.CONFIG not in bound:
        raise Refusal(f"These gin files describe no model: {', '.join(files) or 'none'}. Give a model file, such "
                      "as gin/models/switch_tiny.gin.")
    return gin.part(parts.CONFIG).make(), gin.part(parts.LAYOUT).make() if parts.LAYOUT in bound else None


# The run, and the gin arguments that change its configuration.
RUN = (*GIN, option("--run", "a run folder, whose own configuration is used; or the first NAME", "FOLDER"), TRUST)


def folder_of(arguments: Namespace) -> pathlib.Path:
    """Returns the run folder, or refuses any other folder."""
    folder = places.at(arguments.run)
    if not (folder / CONFIGURATION).is_file() and not run_config.is_in(folder):
        if (folder / folders.DESCRIPTION).is_file():
            run = folders.run_folder_of(folder)
            way_on = (f"holds weights alone; train from them, with --initial_checkpoint={folder}"
                      if run == folder else f"is a checkpoint of one; give --run={run}, and --step to choose one")
            raise Refusal(f"--run must name a run folder, which holds {CONFIGURATION}, and {folder} {way_on}.")
        runs = ([str(file.parent) for file in folder.parent.glob(f"*/{CONFIGURATION}")] if places.is_local(folder)
                else [])
        raise Refusal(f"--run must name a run folder, which holds {CONFIGURATION}; {str(folder)!r} does not."
                      f"{nearest(str(folder), runs)}")
    return folder


def load_run(arguments: Namespace, folder: pathlib.Path, num_cpu_devices: int | None = None,
             on_one_device: bool = False) -> Experiment:
    """Returns a run, from its gin file and the command line, on this machine's devices; see `load`.

    Args:
        arguments: Without `trust` the gin file may name only what the package ships.
        on_one_device: Whether to compute on one device, a TPU VM's host CPU, instead of under the run's layout.
    """
    file = folder / CONFIGURATION
    if not file.is_file():
        raise Refusal(f"{str(folder)!r} has no {CONFIGURATION}, which this command needs.")
    gin = gin_syntax.read([str(file)], search_paths=arguments.gin_search_paths)
    if not arguments.trust:
        experiment.check_trust(gin, str(file))
    defaults = []
    if on_one_device:
        mesh = "MESH_SHAPE" if "MESH_SHAPE" in gin.macros else "Layout.mesh_shape"  # the user's own layout
        defaults = [f"{mesh}='data=1'", "Layout.rules=()", "Layout.at_rest_rules=()", "Layout.backend='auto'"]
    arguments.gin_file = [str(file), *arguments.gin_file]
    described = load(arguments, defaults, num_cpu_devices)
    if on_one_device:
        use_host(arguments)
    described = experiments.place_here(described, is_checked=False)
    if on_one_device and described.layout.num_devices > 1:
        alternative = ", or add --backend=pjrt" if hasattr(arguments, "backend") else ""
        raise Refusal(f"This command works on one device, whatever layout the run trained under, not on "
                      f"{described.layout.num_devices}; leave out the mesh{alternative}.")
    return saved_runs.use_stored_vocabulary(described, folder)


def use_host(arguments: Namespace) -> None:
    """Computes on a TPU VM's host CPU."""
    devices.use_host(arguments.command, ", which --backend=pjrt does" if hasattr(arguments, "backend") else "")
