"""Arguments that several commands share."""

import contextlib
import pathlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli.parser import count, option
from switch_tf.configs import experiment, gin_syntax, parts
from switch_tf.configs.choices import nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.installation import quiet
from switch_tf.partitioning.layout import BACKENDS
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import experiments
    from switch_tf.hardware import devices
    from switch_tf.inference import saved_runs


# `main` takes `--gin.NAME=VALUE`.
GIN = (
    option("--gin_file",
           "gin file, repeatable; the one given last wins. Shipped files such as gin/models/switch_tiny.gin are found "
           "from any folder", "FILE", action="append", default=[]),
    option("--gin_search_paths",
           "folders to look for gin files in, separated by commas, before the shipped ones", "FOLDERS", default=""),
    "--gin.NAME=VALUE overrides a macro or a parameter; text needs quotes within quotes: --gin.MODEL_DIR=\"'runs/x'\".",
)
OUTPUT = option("--output", "a new or empty folder", "FOLDER", required=True)
TRUST = option("--trust",
               "run the gin file of the run even if it names modules that switch_tf does not ship; a gin file is a "
               "program", goes_with="--run; a saved model has no gin file.")


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


def run_options(is_required: bool = True) -> tuple:
    """Declares the run, and the gin arguments that change its configuration."""
    return (*GIN, option("--run", "a run folder, whose own configuration is used", "FOLDER", required=is_required),
            TRUST)


def folder_of(arguments: Namespace) -> pathlib.Path:
    """Returns the run folder, or refuses any other folder."""
    folder = places.at(arguments.run)
    if not (folder / CONFIGURATION).is_file() and not run_config.is_in(folder):
        if (folder / folders.DESCRIPTION).is_file():
            run = folders.run_folder_of(folder)
            way_on = (f"holds weights alone; train from them, with --gin.INITIAL_CHECKPOINT=\"'{folder}'\""
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
