"""The state of a run: model, optimizer, data position and pending metrics; built and restored, and saved.

`check_start` decides which checkpoint a run resumes from, and `keep_config` writes the `config.json` of its folder.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from switch_tf import data, metrics
from switch_tf.checkpoints import continuation, folders, run_config, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs import policies
from switch_tf.configs.run import Run, StepSettings
from switch_tf.data import providers, task_catalog, vocabularies
from switch_tf.data.reading import reading_of
from switch_tf.evaluation.objectives import Objective
from switch_tf.hardware import devices
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places, whole_file
from switch_tf.training import train_step


@dataclasses.dataclass
class State:
    """Everything that a run needs to continue.

    Args:
        model: SwitchTransformer, built.
        optimizer: Keras optimizer, built.
        batches: data.Batches with the next training batches.
        checkpointer: Checkpointer of the run.
        step: int, training steps taken.
        sums: StepMeasurements on the host, summed since the last logged step; None if there are none.
    """

    model: SwitchTransformer
    optimizer: keras.optimizers.Optimizer
    batches: data.Batches
    checkpointer: Checkpointer
    step: int = 0
    sums: metrics.StepMeasurements | None = None

    def save(self, flush: Callable[[], None]) -> None:
        """Starts to save the current step, unless it is saved. See `Checkpointer.save`."""
        self.checkpointer.save(self.step, self.sums and metrics.to_json(self.sums), flush)


def prepare(model: SwitchTransformer, optimizer: keras.optimizers.Optimizer, objective: Objective, run: Run,
            settings: StepSettings, partitioner: Partitioner, folder: RunFolder, configuration: dict,
            say: Callable[[str], None], initial: Any = None) -> State:
    """Builds model, optimizer and input, and restores the newest checkpoint of a run folder, if any.

    Args:
        model, optimizer, objective: not built.
        run: Run.
        settings: StepSettings.
        partitioner: Partitioner.
        folder: RunFolder.
        configuration: `continuation.record` of the run, which the folder's checkpoints have to agree with.
        say: function that prints a line of text.
        initial: weights that a new run starts from, see `tensors.start`, or a run folder or checkpoint, or None.

    Raises:
        Refusal: the checkpoints belong to another configuration, or none of them can be read.
    """
    keras.utils.set_random_seed(run.seed)
    partitioner.build(model, optimizer, lambda model: train_step.freeze(model, settings.trainable))
    objective.build(partitioner)
    objective.restore()
    frozen = "" if settings.trainable == "all" else (
        f" ({sum(variable.value.shape.num_elements() for variable in model.trainable_variables):,} of them trained)")
    say(f"{model.config.num_parameters:,} parameters{frozen}, "
        f"{sum(variable.value.shape.num_elements() for variable in optimizer.variables):,} numbers of optimizer state; "
        f"reading {run.mixture_or_task_name}{_accelerators(partitioner)}")
    batches = data.get_batches(data.description_of_data(run, model.config, "train", run.seed), settings.steps_per_call,
                               partitioner.rows(run.batch_size), objective.added_features())
    checkpointer = Checkpointer(folder.checkpoints, tensors.state_variables(model, optimizer), batches, partitioner,
                                run.keep_checkpoints, run.keep_every, configuration)
    state = State(model, optimizer, batches, checkpointer)
    if not _resume(state, run, folder, configuration, say) and initial is not None:
        _start(state, run, opened(initial), say)
    return state


def _accelerators(partitioner):
    is_cpu = devices.device_type() == "CPU"
    return "" if is_cpu else f"; training on {partitioner.layout.num_devices} x {devices.device_name()}"


def _start(state, run, initial, say):
    """Reads the weights that a new run starts from, and the optimizer's slots and the step if it goes on with them."""
    variables = tensors.state_variables(state.model)
    if run.initial_variables == "with_optimizer":
        state.step = tensors.restore(initial.path, tensors.state_variables(state.model, state.optimizer))["step"]
        say(f"Starting from the weights and the optimizer of {run.initial_checkpoint}, step {state.step}, with the "
            "data from their beginning.")
        return
    others = tensors.start(initial, variables, is_matching=run.initial_variables == "matching")
    step = initial.description["step"]
    if run.initial_variables == "all":
        say(f"Starting from the weights of {run.initial_checkpoint}, step {step}.")
        return
    num_others = sum(variables[path].value.shape.num_elements() for path in others)
    total = sum(variable.value.shape.num_elements() for variable in variables.values())
    rest = f"; the others are new: {', '.join(path.removeprefix('model/') for path in others)}" if others else ""
    say(f"Starting from {total - num_others:,} of {total:,} weights from {run.initial_checkpoint}, step "
        f"{step}{rest}.")


def _resume(state, run, folder, configuration, say) -> bool:
    """Restores the newest checkpoint that can be read. Returns False if there is none.

    Raises:
        Refusal: it belongs to another configuration, or none of several can be read.
    """
    broken = []

    def pass_over(path, error):
        say(f"{error} Trying the one before it.")
        broken.append(path)

    for candidate in candidates(run, configuration, pass_over):
        path, step = candidate.path, candidate.description["step"]
        try:
            sums = _pending_sums(candidate.description, path)
            state.checkpointer.restore(path, candidate.restarts_data)
        except folders.BrokenCheckpoint as error:
            pass_over(path, error)
            continue
        for newer in broken if folder.is_owner else ():
            say(f"{newer} is kept as {folders.set_aside(newer)}.")
        say(f"Going on from step {step} ({path}).")
        for line in candidate.changes:
            say(line)
        if step >= run.train_steps:
            say(f"This run is at step {step} already and TRAIN_STEPS is {run.train_steps}, so nothing is left to "
                "train; a larger TRAIN_STEPS goes on.")
        state.step, state.sums = step, sums
        return True
    if broken:
        raise Refusal(f"No checkpoint in {str(folder.checkpoints)!r} can be read; restore it from a copy, or use "
                      "another MODEL_DIR to start anew.")
    return False


def _pending_sums(description, path):
    """Returns the sums since the last logged step, from a checkpoint's description; None if there are none."""
    pending = description["pending_metrics"]
    try:
        return pending and metrics.from_json(pending)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise folders.BrokenCheckpoint(
            f"{path} has no readable checkpoint.json ('pending_metrics' is damaged).") from error


class Candidate(NamedTuple):
    """A checkpoint that a run may resume from.

    `path`: its folder.
    `description`: contents of its `checkpoint.json`.
    `changes`: lines to print about the differences between its configuration and the run's.
    `restarts_data`: bool, whether the data are read from their beginning.
    """

    path: pathlib.Path
    description: dict[str, Any]
    changes: list[str]
    restarts_data: bool


def candidates(run: Run, configuration: dict[str, Any],
               on_broken: Callable[[pathlib.Path, Exception], None] = lambda path, error: None) -> Iterator[Candidate]:
    """Yields the checkpoints in a run's folder that it may resume from, newest first.

    Lazily, because an older checkpoint matters only if the newer ones turn out to be damaged.

    Args:
        run: Run.
        configuration: `continuation.record` of the run.
        on_broken: function called with the path of each checkpoint that has a damaged description, and the error.

    Raises:
        Refusal: a checkpoint belongs to another configuration.
    """
    for path, description in folders.described(RunFolder.checkpoints_of(run.model_dir), on_broken):
        saved = description["configuration"]
        changes, restarts_data = continuation.check(saved, configuration, path, run.restart_changed_data,
                                                    _vocabularies(run, saved, configuration, path))
        yield Candidate(path, description, changes, restarts_data)


def opened(initial: Any) -> Any:
    """Returns initial weights, see `tensors.start`, of a run folder or checkpoint; others as they are."""
    return tensors.InitialWeights(initial) if isinstance(initial, str | pathlib.Path) else initial


def check_start(run: Run, configuration: dict[str, Any], initial: Any) -> None:
    """Checks that a run can resume from its folder or, if that has no checkpoint, start from `initial`.

    Args:
        run: Run.
        configuration: `continuation.record` of the run.
        initial: weights that a new run starts from, as for `state.prepare`, or None.

    Raises:
        Refusal: the checkpoint belongs to another configuration, or `initial` is no checkpoint.
        BrokenCheckpoint: `initial` is damaged.
    """
    if next(candidates(run, configuration), None) is not None or initial is None:
        return
    initial = opened(initial)
    description = initial.description
    saved = description["configuration"]
    if run.initial_variables == "with_optimizer":
        if not any(name.startswith("optimizer/") for name in description["variables"]):
            raise Refusal(f"Run.initial_variables is 'with_optimizer', and {run.initial_checkpoint} holds weights "
                          "alone; convert them anew with --with_optimizer, or leave Run.initial_variables out.")
        if description["step"] >= run.train_steps:
            raise Refusal(f"{run.initial_checkpoint} is at step {description['step']} and TRAIN_STEPS is "
                          f"{run.train_steps}, the last step of the run; give a larger TRAIN_STEPS.")
    continuation.check_weights(saved, configuration, run.initial_checkpoint,
                               _vocabularies(run, saved, configuration, initial.path), run.initial_variables)


def _vocabularies(run, saved, configuration, checkpoint):
    """Returns the vocabularies of a checkpoint's run and of this run as a user can type them, with their fingerprints.

    None if they are equal, or if the run folder of the checkpoint keeps none.
    """
    fingerprints, folder = saved.get("vocabulary", []), checkpoint.parent.parent
    if fingerprints == configuration["vocabulary"] or not run_config.is_in(folder):
        return None
    try:
        stored = [vocabularies.Stored.from_data(kept) for kept in run_config.read(folder).vocabularies.values()]
    except ValueError:  # damaged, so the checkpoint's fingerprint has to do
        return None
    names = " and ".join(repr(vocabulary.name) for vocabulary in dict.fromkeys(stored))
    files = " and ".join(dict.fromkeys(f"{folder / vocabulary.file}" for vocabulary in stored if vocabulary.file))
    before = f"{names} ({'; '.join(map(str, fingerprints))}{f'; the copy of the run is {files}' * bool(files)})"
    features = providers.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    by_fingerprint = {task_catalog.fingerprint_of_vocabulary(feature.vocabulary): feature.vocabulary
                      for feature in features.values()}
    return before, " and ".join(f"{run.vocabulary or vocabularies.name_of(vocabulary)!r} ({fingerprint})"
                                for fingerprint, vocabulary in sorted(by_fingerprint.items()))


def keep_config(folder: str | pathlib.Path, model: SwitchTransformer, run: Run, activation_dtype: str | None,
                say: Callable[[str], None]) -> None:
    """Copies the vocabularies of a run into its folder, then writes `config.json`, which is enough to use the model.

    A model with a class or dtype of the user's own gets no `config.json`, nor does a task without inputs or targets:
    only the gin file describes them. A failure to write is printed and does not stop the run. A `config.json` of
    something else, such as a Hugging Face model, stays as it is.

    Args:
        folder: path of the run folder.
        model: SwitchTransformer.
        run: Run.
        activation_dtype: str or None. The ACTIVATION_DTYPE that the model's policy was derived from.
        say: function that prints a line of text.
    """
    reason = "the one there is not a run's, and stays"
    try:
        if not run_config.is_foreign(folder):
            _keep_config(folder, model, run, activation_dtype, say)
            return
    except (OSError, Refusal) as error:
        reason = first_line(error)
    say(f"{folder} keeps no {run_config.FILE} of the run ({reason}), so commands on this run need its gin file, its "
        "tasks and its vocabulary.")


def _keep_config(folder, model, run, activation_dtype, say):
    features = providers.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    dtype, config = model.dtype_policy.name, model.config
    if (type(model) is not SwitchTransformer or dtype not in run_config.DTYPES
            or not features.keys() >= run_config.FEATURES):
        whole_file.remove(places.at(folder) / run_config.FILE)
        return
    if activation_dtype not in run_config.ACTIVATION_DTYPES or dtype_policy(activation_dtype) != dtype:
        activation_dtype = None
    copies: dict[str, dict] = {}
    for feature in ("inputs", "targets"):
        vocabulary = features[feature].vocabulary
        if copies and vocabulary == features["inputs"].vocabulary:  # the two share its file
            copies[feature] = copies["inputs"]
            continue
        try:
            stored = vocabularies.store(vocabulary, folder, feature, run.vocabulary)
        except vocabularies.Unreadable as error:  # it was readable when the run was checked
            say(f"{error} Commands on this run will read it from there.")
            stored = vocabularies.Stored(vocabularies.OTHER, vocabulary.sentencepiece_model_file,
                                         vocabulary.vocab_size)
        copies[feature] = stored._asdict()
    homes = {name: policies.get(name).place for name in {config.routing_policy, config.decoder_policy}}
    run_config.write(folder, run_config.RunConfig(
        config, dtype, activation_dtype, run.mixture_or_task_name, dict(run.task_feature_lengths),
        reading_of(run.mixture_or_task_name, run.vocabulary).as_data(), copies,
        {name: place for name, place in homes.items() if not place.startswith("switch_tf.")}))
