"""Arguments that several commands share: gin files and bindings, a trained run, its checkpoint and a sampler."""

import argparse
import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.configs import experiment, gin_syntax, parts
from switch_tf.configs.choices import check_choice, nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.partitioning.layout import BACKENDS
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places
from switch_tf.storage.places import Place

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import decoding, experiments
    from switch_tf.hardware import devices
    from switch_tf.inference import saved_runs

# Back ends of commands that answer texts.
_ANSWERING = ("auto", "pjrt")
# Sampler -> (name, type, help) of its settings.
_SAMPLERS = {
    "greedy": (),
    "sample": (("temperature", float, "divides the logits; below 1 favours likely tokens (default 1)"),
               ("top_k", int, "number of most probable tokens to draw from"),
               ("top_p", float, "draw from the fewest tokens whose probabilities add up to this"),
               ("seed", int, "seed of the random numbers (default 0)")),
    "beam": (("num_beams", int, "sequences that are followed at a time (default 4)"),
             ("length_penalty", float, "T5's alpha, 0 for none (default 0.6)"),
             ("num_results", int, "sequences to write (default 1)")),
}


def add_gin_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--gin_file` and `--gin_search_paths`; `--gin.NAME=VALUE` is taken by main."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE",
                        help="gin file, repeatable; the one given last wins. Shipped files such as "
                             "gin/models/switch_tiny.gin are found from any folder")
    parser.add_argument("--gin_search_paths", default="", metavar="FOLDERS",
                        help="folders to look for gin files in, separated by commas, before the shipped ones")
    parser.epilog = (f"{parser.epilog} " if parser.epilog else "") + (
        "--gin.NAME=VALUE overrides a macro or a parameter; text needs quotes within quotes: "
        "--gin.MODEL_DIR=\"'runs/x'\".")


def add_device_arguments(parser: argparse.ArgumentParser, num_devices: int | None = None) -> None:
    """Declares `--devices`, with a default, and `--backend`, which main makes a binding."""
    parser.add_argument("--devices", at_least=1, default=num_devices,
                        help=f"virtual devices to make of this machine's CPU (default {num_devices or 'as it is'})")
    parser.add_argument("--backend", metavar="NAME",
                        help=f"back end that runs the layout: {', '.join(BACKENDS)} (default: Layout.backend of the "
                             "gin files)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declares the `--output` of `new_output`."""
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")


@contextlib.contextmanager
def new_output(arguments: argparse.Namespace) -> Iterator[Place]:
    """Yields the `--output`, locked within this scope, which is empty or does not exist yet."""
    output = checks.path("--output", arguments.output)
    checks.new_folder(output)
    with lock.held(output):
        yield output


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declares the `--trust` of `load_run`."""
    parser.add_argument("--trust", action="store_true",
                        help="run the gin file of the run even if it names modules that switch_tf does not ship; a gin "
                             "file is a program")


def look(arguments: argparse.Namespace, defaults: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a command line, with nothing built and without TensorFlow; see `Experiment.from_gin`.

    Args:
        arguments: What `add_gin_arguments` declares.
        defaults: "NAME=VALUE" that the command line overrides.
    """
    return Experiment.from_gin(arguments.gin_file, [*defaults, *arguments.gin_bindings], arguments.gin_search_paths)


def load(arguments: argparse.Namespace, defaults: Sequence[str] = (), num_cpu_devices: int | None = None,
         check: Callable[[Experiment], Any] = lambda described: None) -> Experiment:
    """Returns the experiment of a command line, and imports TensorFlow if nothing is wrong with it.

    Args:
        arguments, defaults: As for `look`.
        num_cpu_devices: Number of devices to make of the CPU, None to leave it as it is.
        check: Function that raises Refusal for an experiment that the command cannot use.
    """
    quiet.expect_tensorflow(num_cpu_devices)  # a gin file of the user's own may import it
    described = look(arguments, defaults)
    described.gin.check_read(arguments.gin_bindings)
    check(described)
    quiet.import_tensorflow(num_cpu_devices)
    return described


def read_model(arguments: argparse.Namespace) -> tuple[SwitchConfig, Any]:
    """Returns the model that gin files describe, and their Layout or None."""
    files = arguments.gin_file
    found = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check()
    bound = {name for _, name in found.bound}
    if parts.CONFIG not in bound:
        raise Refusal(f"These gin files describe no model: {', '.join(files) or 'none'}. Give a model file, such "
                      "as gin/models/switch_tiny.gin.")
    return found.part(parts.CONFIG).make(), found.part(parts.LAYOUT).make() if parts.LAYOUT in bound else None


def add_run_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declares the run and the gin arguments that change its configuration."""
    add_gin_arguments(parser)
    parser.add_argument("--run", required=is_required, metavar="FOLDER",
                        help="a run folder, whose own configuration is used")
    add_trust(parser)


def add_decoding_arguments(parser: argparse.ArgumentParser, answers: bool = True) -> None:
    """Declares the run with the gin arguments, its checkpoint, how texts are read, the sampler and the length.

    Args:
        parser: Parser of the command.
        answers: Whether the command answers texts of a run, and has `--backend` and `--devices`.
    """
    add_run_arguments(parser, is_required=answers)
    parser.add_argument("--step", default="last", metavar="N|best|last",
                        help="a step, the best one by the run's BEST_METRIC, or the newest (default)")
    parser.add_argument("--raw", action="store_true",
                        help="read texts as they are: without the task's prefix, and <extra_id_0> as a gap")
    parser.add_argument("--max_length", at_least=1,
                        help="tokens to decode at most (default: the targets of TASK_FEATURE_LENGTHS)")
    parser.add_argument("--sampler", choices=tuple(_SAMPLERS), default="greedy",
                        help="the most probable token (default), a drawn one, or beam search")
    for sampler, options in _SAMPLERS.items():
        for name, kind, meaning in options:
            parser.add_argument(f"--{name}", type=kind, metavar="X", help=f"with --sampler {sampler}: {meaning}")
    if answers:
        parser.add_argument("--backend", metavar="NAME",
                            help="auto (default): one device of TensorFlow, whatever layout the run trained under; "
                                 "pjrt: the run's layout on PJRT (on TPUs and GPUs the default for runs that recorded "
                                 "it)")
        parser.add_argument("--devices", at_least=1,
                            help="with --backend pjrt: virtual devices to make of this machine's CPU")


def check_decoding(arguments: argparse.Namespace) -> None:
    """Refuses back ends that answer no texts, devices without a layout, and settings of samplers not chosen."""
    if getattr(arguments, "backend", None) is not None:
        check_choice("--backend", arguments.backend, _ANSWERING)
    if getattr(arguments, "devices", None) is not None and arguments.backend != "pjrt":
        raise Refusal("--devices goes with --backend=pjrt; otherwise one device answers.")
    for sampler, options in _SAMPLERS.items():
        for name, *_ in options:
            if getattr(arguments, name) is not None and sampler != arguments.sampler:
                raise Refusal(f"--{name} goes with --sampler {sampler}, not {arguments.sampler}.")


def sampler_of(arguments: argparse.Namespace) -> "decoding.Sampler":
    """Returns the sampler of a command line."""
    options = {name: getattr(arguments, name) for name, *_ in _SAMPLERS[arguments.sampler]}
    return decoding.SAMPLERS[arguments.sampler](**{
        name: value for name, value in options.items() if value is not None})


def folder_of(arguments: argparse.Namespace) -> pathlib.Path:
    """Returns the run folder; refuses any other folder."""
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


def load_run(arguments: argparse.Namespace, folder: pathlib.Path, num_cpu_devices: int | None = None,
         on_one_device: bool = False) -> Experiment:
    """Returns the run of its gin file and the command line, on this machine's devices; see `load`.

    Args:
        arguments: What `add_run_arguments` declares. Without `trust` the gin file may name only what the package ships.
        folder: From `folder_of`.
        num_cpu_devices: Number of devices to make of the CPU, None to leave it as it is.
        on_one_device: Whether one device computes, whatever layout the run trained under; on a TPU VM the host's CPU.
    """
    file = folder / CONFIGURATION
    if not file.is_file():
        raise Refusal(f"{str(folder)!r} has no {CONFIGURATION}, which this command needs.")
    found = gin_syntax.read([str(file)], search_paths=arguments.gin_search_paths)
    if not arguments.trust:
        experiment.check_trust(found, str(file))
    defaults = []
    if on_one_device:
        mesh = "MESH_SHAPE" if "MESH_SHAPE" in found.macros else "Layout.mesh_shape"  # in a layout of the user's own
        defaults = [f"{mesh}='data=1'", "Layout.rules=()", "Layout.at_rest_rules=()", "Layout.backend='auto'"]
    arguments.gin_file = [str(file), *arguments.gin_file]
    described = load(arguments, defaults, num_cpu_devices)
    if on_one_device:
        _use_host(arguments)
    described = experiments.on_this_machine(described, is_checked=False)
    if on_one_device and described.layout.num_devices > 1:
        alternative = ", or add --backend=pjrt" if hasattr(arguments, "backend") else ""
        raise Refusal(f"This command works on one device, whatever layout the run trained under, not on "
                      f"{described.layout.num_devices}; leave out the mesh{alternative}.")
    return saved_runs.with_stored_vocabulary(described, folder) if run_config.is_in(folder) else described


def _use_host(arguments):
    """Makes this process run on the host's CPU of a TPU VM."""
    devices.use_host(arguments.command, ", which --backend=pjrt does" if hasattr(arguments, "backend") else "")


def load_text_model(arguments: argparse.Namespace, folder: pathlib.Path, checkpoint: pathlib.Path,
                    batch_size: int | None, any_batch: bool = False) -> tuple[str, Any, dict]:
    """Returns the name of a run's task, the model that answers texts, and `saved_runs.load_text_model`'s identity.

    Args:
        arguments: What `add_decoding_arguments` declares.
        folder: From `folder_of`.
        checkpoint: One of its checkpoints.
        batch_size: See `TextModel`.
        any_batch: Whether batches may have any size where programs have no fixed shapes.
    """
    described = load_to_answer(arguments, folder)
    if any_batch and not described.partitioner.has_fixed_shapes:
        batch_size = None
    return described.run.mixture_or_task_name, *saved_runs.load_text_model(
        described, checkpoint, arguments.max_length, sampler_of(arguments), batch_size, arguments.raw)


def load_to_answer(arguments: argparse.Namespace, folder: pathlib.Path) -> Any:
    """Returns the run for a command that works on texts: on one device, or under its layout on the pjrt back end.

    On a TPU VM the one device is the host's CPU. With a `config.json`, and without gin arguments or --trust, the run
    needs neither its task nor its data and executes nothing in the folder, unless only code can make the vocabulary.
    """
    if hasattr(arguments, "backend") and _is_for_pjrt(arguments, folder):
        if (count := len(cluster.members().addresses)) > 1:
            raise Refusal(f"`switch-tf {arguments.command}` answers in one process, and TF_CONFIG or "
                          f"TPU_WORKER_HOSTNAMES names {count}; unset it, or answer with --backend=auto on the CPU of "
                          "one machine.")
        described = load_run(arguments, folder, arguments.devices)
        described.layout.check_sizes(described.config.axis_sizes)
        return described
    arguments.gin_bindings = [binding for binding in arguments.gin_bindings if binding != "Layout.backend='auto'"]
    if run_config.is_in(folder) and not (arguments.gin_file or arguments.gin_bindings or arguments.trust):
        saved = run_config.read(folder)
        quiet.import_tensorflow()
        _use_host(arguments)
        if saved_run := saved_runs.from_config(saved, folder):
            return saved_run
    return load_run(arguments, folder, on_one_device=True)


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
