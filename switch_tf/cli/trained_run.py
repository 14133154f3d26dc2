"""What commands on a run that was trained share: its folder, which of its checkpoints, and its gin configuration."""

import hashlib
import pathlib
import re

from switch_tf.cli import gin_files, gin_run, gin_trust
from switch_tf.cli.main import Mistake
from switch_tf.training import checkpoint_folders
from switch_tf.training.run_folder import CONFIGURATION, RunFolder

_ONE_DEVICE = ["Layout.rules=()", "Layout.at_rest_rules=()", "Layout.backend='auto'"]


def add_arguments(parser) -> None:
    """Declares the run and the gin arguments that change what it says."""
    gin_files.add_arguments(parser)
    parser.add_argument("--run", required=True, metavar="FOLDER", help="a run folder, whose own configuration is used")
    parser.add_argument("--trust", action="store_true",
                        help="run the run's gin file as the program that it is, whatever it imports and calls")


def folder_of(arguments) -> pathlib.Path:
    """The run folder, which has to be one."""
    folder = pathlib.Path(arguments.run)
    if not (folder / CONFIGURATION).is_file():
        raise Mistake(f"--run must name a run folder, which holds {CONFIGURATION}; {str(folder)!r} does not.")
    return folder


def load(arguments, folder, num_cpu_devices=None, defaults=(), on_host=False) -> gin_run.GinRun:
    """The run that its folder and the command line describe, on this machine's devices; see `gin_run.load`."""
    if not arguments.trust:
        gin_trust.check(folder / CONFIGURATION, arguments.gin_search_paths)
    arguments.gin_file = [str(folder / CONFIGURATION), *arguments.gin_file]
    gin_run.load(arguments, defaults, num_cpu_devices)
    if on_host:
        from switch_tf.partitioning import devices

        devices.use_host(arguments.command)
    return gin_run.on_this_machine(is_checked=False)


def load_on_one_device(arguments, folder) -> gin_run.GinRun:
    """The same on one device, whatever layout it was trained under; on a TPU VM on the host's CPU."""
    has_macro = re.search(r"^MESH_SHAPE\s*=", (folder / CONFIGURATION).read_text(), re.MULTILINE)
    mesh = "MESH_SHAPE" if has_macro else "Layout.mesh_shape"  # in a layout of the user's own
    described = load(arguments, folder, defaults=[f"{mesh}='data=1'", *_ONE_DEVICE], on_host=True)
    if described.layout.num_devices > 1:
        raise Mistake(f"This command works on one device, whatever layout the run trained under, not on "
                      f"{described.layout.num_devices}; leave out the mesh.")
    return described


def load_text_model(described, checkpoint, max_length=None, sampler="greedy", batch_size=32):
    """The weights of a checkpoint in a model that answers texts.

    Args:
        described: from `load_on_one_device`.
        checkpoint: folder.
        max_length: int, tokens to decode at most; None for as many as the run's targets have.
        sampler, batch_size: see `TextModel`.

    Returns:
        (TextModel, dict), the latter what its answers depend on besides the sampler: the step, hashes, lengths.
    """
    from switch_tf import data
    from switch_tf.inference.text_model import TextModel
    from switch_tf.training import checkpoints

    run, config = described.run, described.config
    data.check_task(run.mixture_or_task_name)
    data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
    model = described.make_model()
    described.partitioner.build(model)
    text_model = TextModel(model, data.reading_of(run.mixture_or_task_name, run.vocabulary),
                           run.task_feature_lengths["inputs"], max_length or run.task_feature_lengths["targets"],
                           sampler, batch_size)
    step = checkpoints.restore(checkpoint, checkpoints.state_variables(model))["step"]
    described_model = f"{config!r} {model.dtype_policy.name}"
    return text_model, {
        "step": step, "weights": checkpoint_folders.hash_of_weights(checkpoint),
        "model": hashlib.sha256(described_model.encode()).hexdigest(),
        "vocabulary": data.vocabulary_fingerprint(run.mixture_or_task_name, run.vocabulary),
        "inputs_length": text_model.inputs_length, "max_length": text_model.max_length}


def add_checkpoint_argument(parser) -> None:
    """Declares which checkpoint of the run, one, is meant; see `one_checkpoint`."""
    parser.add_argument("--step", default="last", metavar="N|best|last",
                        help="a step, the best one by the run's BEST_METRIC, or the newest (default)")


def one_checkpoint(arguments, folder) -> pathlib.Path:
    """The checkpoint that `--step` means.

    Raises:
        Mistake: see `checkpoints`.
    """
    if arguments.step == "all":
        raise Mistake("--step must be best, last or a step: one checkpoint answers, not 'all'.")
    return checkpoints(folder, arguments.step)[0]


def checkpoints(folder, step: str, hint: str = "") -> list[pathlib.Path]:
    """The checkpoints that a user means by a step, "best", "last" or "all", oldest first.

    Raises:
        Mistake: there is none, for which `hint` says what else to do, or not that one.
    """
    saved = checkpoint_folders.steps(RunFolder.checkpoints_of(folder))
    if not saved:
        raise Mistake(f"The run folder {str(folder)!r} has no checkpoint yet; train it first{hint}.")
    if step == "all":
        chosen = saved
    elif step == "last":
        chosen = saved[-1:]
    elif step == "best":
        best = checkpoint_folders.best(RunFolder.checkpoints_of(folder))
        if best is None:
            raise Mistake(f"The run in {str(folder)!r} keeps no best checkpoint; give --step=last, or train it with "
                          "--gin.BEST_METRIC=\"'eval/<task>/<metric>'\".")
        chosen = [best["step"]]
    elif step.isdecimal() and int(step) in saved:
        chosen = [int(step)]
    else:
        raise Mistake(f"--step must be best, last, all or a step with a checkpoint ({', '.join(map(str, saved))}), "
                      f"not {step!r}.")
    return [checkpoint_folders.path_of(RunFolder.checkpoints_of(folder), one) for one in chosen]
