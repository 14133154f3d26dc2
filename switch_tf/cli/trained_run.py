"""Arguments of commands on a trained run: its folder, its checkpoint and its configuration."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from etils import epy

from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli import gin_files, sampler_arguments
from switch_tf.configs import experiment, gin_syntax, parts
from switch_tf.configs.choices import check_choice, nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.storage import places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import experiments
    from switch_tf.hardware import devices
    from switch_tf.inference import saved_runs

# Back ends of commands that answer texts.
_ANSWERING = ("auto", "pjrt")
_ONE_DEVICE = ["Layout.rules=()", "Layout.at_rest_rules=()", "Layout.backend='auto'"]


def add_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declares the run and the gin arguments that change its configuration."""
    gin_files.add_arguments(parser)
    parser.add_argument("--run", required=is_required, metavar="FOLDER",
                        help="a run folder, whose own configuration is used")
    parser.add_argument("--trust", action="store_true",
                        help="run the gin file of the run even if it names modules that switch_tf does not ship; a gin "
                             "file is a program")


def add_decoding_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declares the run with the gin arguments, its checkpoint, how texts are read, and the sampler."""
    add_arguments(parser, is_required)
    parser.add_argument("--step", default="last", metavar="N|best|last",
                        help="a step, the best one by the run's BEST_METRIC, or the newest (default)")
    parser.add_argument("--raw", action="store_true",
                        help="read texts as they are: without the task's prefix, and <extra_id_0> as a gap")
    sampler_arguments.add_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--backend` and `--devices` of commands that answer texts."""
    parser.add_argument("--backend", metavar="NAME",
                        help="auto (default): one device of TensorFlow, whatever layout the run trained under; pjrt: "
                             "the run's layout on PJRT (on TPUs and GPUs the default for runs that recorded it)")
    parser.add_argument("--devices", type=int, metavar="N",
                        help="with --backend pjrt: virtual devices to make of this machine's CPU")


def check_device_arguments(arguments: argparse.Namespace) -> None:
    """Refuses another back end than those that answer texts, and devices without a layout."""
    if arguments.backend is not None:
        check_choice("--backend", arguments.backend, _ANSWERING)
    if arguments.devices is not None and arguments.backend != "pjrt":
        raise Refusal("--devices goes with --backend=pjrt; otherwise one device answers.")


def folder_of(arguments: argparse.Namespace) -> pathlib.Path:
    """Returns the run folder; refuses any other folder."""
    folder = places.at(arguments.run)
    if not (folder / CONFIGURATION).is_file() and not run_config.is_in(folder):
        if (folder / folders.DESCRIPTION).is_file():
            raise Refusal(f"--run must name a run folder, which holds {CONFIGURATION}, and {folder} {_way_on(folder)}.")
        runs = ([str(file.parent) for file in folder.parent.glob(f"*/{CONFIGURATION}")] if places.is_local(folder)
                else [])
        raise Refusal(f"--run must name a run folder, which holds {CONFIGURATION}; {str(folder)!r} does not."
                      f"{nearest(str(folder), runs)}")
    return folder


def _way_on(checkpoint):
    """Returns the end of a sentence about a checkpoint: what it is, and how to use it."""
    run = folders.run_folder_of(checkpoint)
    if run == checkpoint:
        return f"holds weights alone; train from them, with --gin.INITIAL_CHECKPOINT=\"'{checkpoint}'\""
    return f"is a checkpoint of one; give --run={run}, and --step to choose one"


def load(arguments: argparse.Namespace, folder: pathlib.Path, num_cpu_devices: int | None = None,
         defaults: Sequence[str] = (), on_host: bool = False) -> Experiment:
    """Returns the run of its gin file and the command line, on this machine's devices; see `gin_files.load`.

    Raises:
        Refusal: See `experiment.check_trust` and `gin_files.load`.
    """
    _check_gin_file(arguments, folder)
    arguments.gin_file = [str(folder / CONFIGURATION), *arguments.gin_file]
    described = gin_files.load(arguments, defaults, num_cpu_devices)
    if on_host:
        _use_host(arguments)
    described = experiments.on_this_machine(described, is_checked=False)
    return saved_runs.with_stored_vocabulary(described, folder) if run_config.is_in(folder) else described


def _use_host(arguments):
    """Makes this process run on the host's CPU of a TPU VM."""
    alternative = ", which --backend=pjrt does" if hasattr(arguments, "backend") else ""
    devices.use_host(arguments.command, alternative)


def _check_gin_file(arguments, folder):
    """Returns what the gin file of the run says.

    Raises:
        Refusal: It is missing or, without --trust, names what the package does not ship.
    """
    if not (folder / CONFIGURATION).is_file():
        raise Refusal(f"{str(folder)!r} has no {CONFIGURATION}, which this command needs.")
    found = gin_syntax.read([str(folder / CONFIGURATION)], search_paths=arguments.gin_search_paths)
    if not arguments.trust:
        experiment.check_trust(found, str(folder / CONFIGURATION))
    return found


def load_to_answer(arguments: argparse.Namespace, folder: pathlib.Path) -> Any:
    """Returns the run for a command that answers texts: on one device, or under its layout on the pjrt back end.

    Raises:
        Refusal: The layout does not fit this machine's devices, or several machines would answer.
    """
    if not _is_for_pjrt(arguments, folder):
        arguments.gin_bindings = [binding for binding in arguments.gin_bindings if binding != "Layout.backend='auto'"]
        return load_on_one_device(arguments, folder)
    if (count := len(cluster.members().addresses)) > 1:
        raise Refusal(f"`switch-tf {arguments.command}` answers in one process, and TF_CONFIG or TPU_WORKER_HOSTNAMES "
                      f"names {count}; unset it, or answer with --backend=auto on the CPU of one machine.")
    described = load(arguments, folder, arguments.devices)
    described.layout.check_sizes(described.config.axis_sizes)
    return described


def _is_for_pjrt(arguments, folder):
    """Returns whether PJRT answers: if asked to, and on a TPU or GPU of JAX for runs that trained with it."""
    configuration = folder / CONFIGURATION
    has_accelerator = host.has_tpu() or host.has_gpu_of_jax()
    if arguments.backend is None and has_accelerator and configuration.is_file():
        try:
            return gin_syntax.read([str(configuration)]).get(parts.LAYOUT, "backend") == "pjrt"
        except Refusal:  # damaged, and answers from config.json do not need it
            return False
    return arguments.backend == "pjrt"


def load_on_one_device(arguments: argparse.Namespace, folder: pathlib.Path) -> Any:
    """Returns the run on one device, whatever its layout; a `SavedRun` without gin if its `config.json` allows that.

    On a TPU VM the device is the host's CPU. With a `config.json`, neither the task nor its data are needed, and
    nothing in the folder is executed.
    """
    if run_config.is_in(folder) and not (arguments.gin_file or arguments.gin_bindings or arguments.trust):
        saved = run_config.read(folder)
        quiet.import_tensorflow()
        _use_host(arguments)
        if saved_run := saved_runs.from_config(saved, folder):
            return saved_run
    return load_task_on_one_device(arguments, folder)


def load_task_on_one_device(arguments: argparse.Namespace, folder: pathlib.Path) -> Experiment:
    """Returns the run of its gin file on one device, whatever its layout, with the task and its data."""
    has_macro = "MESH_SHAPE" in _check_gin_file(arguments, folder).macros
    mesh = "MESH_SHAPE" if has_macro else "Layout.mesh_shape"  # in a layout of the user's own
    described = load(arguments, folder, defaults=[f"{mesh}='data=1'", *_ONE_DEVICE], on_host=True)
    if described.layout.num_devices > 1:
        alternative = ", or add --backend=pjrt" if hasattr(arguments, "backend") else ""
        raise Refusal(f"This command works on one device, whatever layout the run trained under, not on "
                      f"{described.layout.num_devices}; leave out the mesh{alternative}.")
    return described
