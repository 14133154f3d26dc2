"""What commands on a run that was trained share: its folder, which of its checkpoints, and its gin configuration."""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from switch_tf.checkpoints import folders, run_config, sizes
from switch_tf.checkpoints.run_folder import CONFIGURATION, RunFolder
from switch_tf.cli import gin_files, gin_run, gin_trust
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal


class DataRun(NamedTuple):
    """A run as its `config.json` describes it, on one device; what it shares with `GinRun` has the same names.

    `run`: Described, its task and lengths; `reading`: data.Reading; `make_model`: function to a new
    SwitchTransformer.
    """

    config: Any
    partitioner: Any
    run: Any
    reading: Any
    make_model: Callable


class Described(NamedTuple):
    """The task of a run, `mixture_or_task_name`, and its `task_feature_lengths`, a dict of tokens."""

    mixture_or_task_name: str
    task_feature_lengths: dict


_ONE_DEVICE = ["Layout.rules=()", "Layout.at_rest_rules=()", "Layout.backend='auto'"]


def add_arguments(parser, is_required=True) -> None:
    """Declares the run and the gin arguments that change what it says."""
    gin_files.add_arguments(parser)
    parser.add_argument("--run", required=is_required, metavar="FOLDER",
                        help="a run folder, whose own configuration is used")
    parser.add_argument("--trust", action="store_true",
                        help="run the gin file of the run even if it names modules that switch_tf does not ship; a gin "
                             "file is a program")


def folder_of(arguments) -> pathlib.Path:
    """The run folder, which has to be one."""
    folder = pathlib.Path(arguments.run)
    if not (folder / CONFIGURATION).is_file() and not run_config.is_in(folder):
        raise Refusal(f"--run must name a run folder, which holds {CONFIGURATION}; {str(folder)!r} does not.")
    return folder


def load(arguments, folder, num_cpu_devices=None, defaults=(), on_host=False) -> gin_run.GinRun:
    """The run that its gin file and the command line describe, on this machine's devices; see `gin_run.load`.

    Raises:
        Refusal: see `gin_trust.check` and `gin_run.load`.
    """
    _check_gin_file(arguments, folder)
    arguments.gin_file = [str(folder / CONFIGURATION), *arguments.gin_file]
    gin_run.load(arguments, defaults, num_cpu_devices)
    if on_host:
        from switch_tf.partitioning import devices

        devices.use_host(arguments.command)
    described = gin_run.on_this_machine(is_checked=False)
    return _with_own_vocabulary(described, folder) if run_config.is_in(folder) else described


def _check_gin_file(arguments, folder):
    """Refuses a gin file of the run that is missing or, without --trust, names what the package does not ship."""
    if not (folder / CONFIGURATION).is_file():
        raise Refusal(f"{str(folder)!r} has no {CONFIGURATION}, which this command needs.")
    if not arguments.trust:
        gin_trust.check(folder / CONFIGURATION, arguments.gin_search_paths)


def _with_own_vocabulary(described, folder):
    """The run with the copy of its vocabulary, unless the command line chose another vocabulary or task."""
    from switch_tf.data import stored_vocabularies

    saved = gin_run.or_mistake(lambda: run_config.read(folder))
    stored = gin_run.or_mistake(lambda: {
        stored_vocabularies.Stored.from_data(one) for one in saved.vocabularies.values()})
    (one, *others), run = stored, described.run
    if others or run.mixture_or_task_name != saved.task or run.vocabulary not in (None, one.name):
        return described
    choice = gin_run.or_mistake(lambda: stored_vocabularies.choice_of(one, folder))
    return described._replace(run=dataclasses.replace(run, vocabulary=choice)) if choice else described


def load_on_one_device(arguments, folder) -> "gin_run.GinRun | DataRun":
    """The same on one device, whatever layout it was trained under, and without the gin file where that is possible.

    On a TPU VM that device is the host's CPU. A run that has a `config.json` needs neither its tasks nor their data,
    and nothing that it says is carried out.
    """
    overrides = arguments.gin_file or arguments.gin_bindings or arguments.trust
    if run_config.is_in(folder) and not overrides:
        described = _from_data(arguments, folder)
        if described is not None:
            return described
    _check_gin_file(arguments, folder)  # before it is read
    has_macro = re.search(r"^MESH_SHAPE\s*=", (folder / CONFIGURATION).read_text(), re.MULTILINE)
    mesh = "MESH_SHAPE" if has_macro else "Layout.mesh_shape"  # in a layout of the user's own
    described = load(arguments, folder, defaults=[f"{mesh}='data=1'", *_ONE_DEVICE], on_host=True)
    if described.layout.num_devices > 1:
        raise Refusal(f"This command works on one device, whatever layout the run trained under, not on "
                      f"{described.layout.num_devices}; leave out the mesh.")
    return described


def _from_data(arguments, folder):
    """The run that `config.json` describes; None where its vocabulary is one that only code can make."""
    saved = gin_run.or_mistake(lambda: run_config.read(folder))
    gin_run.or_mistake(quiet.import_tensorflow)
    from switch_tf import data
    from switch_tf.data import stored_vocabularies
    from switch_tf.models.switch_transformer import SwitchTransformer
    from switch_tf.ops.dtypes import dtype_policy
    from switch_tf.partitioning import devices
    from switch_tf.partitioning.partitioner import Partitioner

    devices.use_host(arguments.command)
    stored = gin_run.or_mistake(lambda: {
        feature: stored_vocabularies.Stored.from_data(one) for feature, one in saved.vocabularies.items()})
    if any(one.kind == stored_vocabularies.OTHER for one in stored.values()):
        return None
    inputs, targets = (gin_run.or_mistake(lambda one=stored[feature]: stored_vocabularies.load(one, folder))
                       for feature in ("inputs", "targets"))
    reading = gin_run.or_mistake(lambda: data.Reading.from_data(saved.reading, inputs, targets))
    if (largest := max(one.size for one in stored.values())) > saved.model.vocab_size:
        raise Refusal(f"The model in {folder} has an embedding for {saved.model.vocab_size} ids, and its vocabulary "
                      f"has {largest}; config.json and the vocabulary are of different runs.")
    dtype = dtype_policy(saved.activation_dtype) if saved.activation_dtype else saved.dtype
    return DataRun(saved.model, Partitioner(), Described(saved.task, saved.task_feature_lengths), reading,
                   lambda: SwitchTransformer(saved.model, dtype=dtype))


def check_sizes(described, checkpoint) -> None:
    """Refuses a checkpoint that is too small for the model, before anything is allocated."""
    try:
        sizes.check(described.config, checkpoint)
    except (ValueError, folders.BrokenCheckpoint) as error:
        raise Refusal(first_line(error)) from error


def add_raw_argument(parser) -> None:
    """Declares --raw, which reads texts without the conventions of the run's task."""
    parser.add_argument("--raw", action="store_true",
                        help="read texts as they are: without the task's prefix, and <extra_id_0> as a gap")


def load_text_model(described, checkpoint, max_length=None, sampler="greedy", batch_size=32, is_raw=False):
    """The weights of a checkpoint in a model that answers texts.

    Args:
        described: from `load_on_one_device`.
        checkpoint: folder.
        max_length: int, tokens to decode at most; None for as many as the run's targets have.
        sampler, batch_size: see `TextModel`.
        is_raw: bool. Texts are read as they are, see `data.Reading.raw`.

    Returns:
        (TextModel, dict), the latter what its answers depend on besides the sampler: the step, hashes, lengths.
    """
    from switch_tf import data
    from switch_tf.checkpoints import tensors
    from switch_tf.data.fingerprints import fingerprint_of_vocabulary
    from switch_tf.inference.text_model import TextModel

    run, config = described.run, described.config
    check_sizes(described, checkpoint)
    if isinstance(described, DataRun):
        reading = described.reading
    else:
        data.check_task(run.mixture_or_task_name)
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        reading = data.reading_of(run.mixture_or_task_name, run.vocabulary)
    model = described.make_model()
    described.partitioner.build(model)
    text_model = TextModel(model, reading.raw() if is_raw else reading, run.task_feature_lengths["inputs"],
                           max_length or run.task_feature_lengths["targets"], sampler, batch_size)
    step = tensors.restore(checkpoint, tensors.state_variables(model))["step"]
    described_model = f"{config!r} {model.dtype_policy.name}"
    return text_model, {
        "step": step, "weights": folders.hash_of_weights(checkpoint),
        "model": hashlib.sha256(described_model.encode()).hexdigest(),
        "vocabulary": sorted({fingerprint_of_vocabulary(one) for one in (reading.inputs, reading.targets)}),
        "reading": text_model.features.as_data(),
        "inputs_length": text_model.inputs_length, "max_length": text_model.max_length}


def add_checkpoint_argument(parser) -> None:
    """Declares which checkpoint of the run, one, is meant; see `one_checkpoint`."""
    parser.add_argument("--step", default="last", metavar="N|best|last",
                        help="a step, the best one by the run's BEST_METRIC, or the newest (default)")


def one_checkpoint(arguments, folder) -> pathlib.Path:
    """The checkpoint that `--step` means.

    Raises:
        Refusal: see `checkpoints`.
    """
    if arguments.step == "all":
        raise Refusal("--step must be best, last or a step: one checkpoint answers, not 'all'.")
    return checkpoints(folder, arguments.step)[0]


def checkpoints(folder, step: str, hint: str = "") -> list[pathlib.Path]:
    """The checkpoints that a user means by a step, "best", "last" or "all", oldest first.

    Raises:
        Refusal: there is none, for which `hint` says what else to do, or not that one.
    """
    saved = folders.steps(RunFolder.checkpoints_of(folder))
    if not saved:
        raise Refusal(f"The run folder {str(folder)!r} has no checkpoint yet; train it first{hint}.")
    if step == "all":
        chosen = saved
    elif step == "last":
        chosen = saved[-1:]
    elif step == "best":
        best = folders.best(RunFolder.checkpoints_of(folder))
        if best is None:
            raise Refusal(f"The run in {str(folder)!r} keeps no best checkpoint; give --step=last, or train it with "
                          "--gin.BEST_METRIC=\"'eval/<task>/<metric>'\".")
        chosen = [best["step"]]
    elif step.isdecimal() and int(step) in saved:
        chosen = [int(step)]
    else:
        raise Refusal(f"--step must be best, last, all or a step with a checkpoint ({', '.join(map(str, saved))}), "
                      f"not {step!r}.")
    return [folders.path_of(RunFolder.checkpoints_of(folder), one) for one in chosen]
