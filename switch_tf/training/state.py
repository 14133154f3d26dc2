"""The state of a run: model, optimizer, data position and pending metrics; built and restored, and saved."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from switch_tf import data, metrics
from switch_tf.checkpoints import folders, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.hardware import devices
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training import resuming, trainable


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
    partitioner.build(model, optimizer, lambda model: trainable.select(model, settings.trainable))
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
        _start(state, run, resuming.opened(initial), say)
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

    for candidate in resuming.candidates(run, configuration, pass_over):
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
