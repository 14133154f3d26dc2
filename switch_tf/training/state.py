"""Where a run stands: model, optimizer, place in the data, what was measured since the last log; restored and saved."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from switch_tf import data, metrics
from switch_tf.training import checkpoint_folders, checkpoints


@dataclasses.dataclass
class State:
    """All that a run goes on with.

    Args:
        model: SwitchTransformer, built.
        optimizer: Keras optimizer, built.
        iterator: of the training batches that come next, dict of <int32>[steps_per_call, batch, length].
        step: int, training steps that were taken.
        sums: StepMeasurements on the host of the steps since the last one that was logged, None where there are none.
    """

    model: Any
    optimizer: Any
    iterator: Any
    step: int = 0
    sums: metrics.StepMeasurements | None = None


def dataset(run, config, split: str, seed: int) -> tf.data.Dataset:
    """Batches of a run's task, dict of <int32>[batch, length]."""
    return data.get_dataset(data.DatasetDescription(
        run.mixture_or_task_name, run.task_feature_lengths, run.batch_size, split, seed, run.pack,
        config.is_encoder_only))


def prepare(model, optimizer, run, settings, partitioner, folder, say) -> State:
    """Builds model, optimizer and input, and restores the newest checkpoint of a run folder, if any.

    Args:
        model, optimizer: not built.
        run: Run.
        settings: StepSettings.
        partitioner: Partitioner.
        folder: RunFolder.
        say: function of a line of text.
    """
    keras.utils.set_random_seed(run.seed)
    partitioner.build(model, optimizer)
    say(f"{model.config.num_parameters:,} parameters, "
        f"{sum(variable.value.shape.num_elements() for variable in optimizer.variables):,} numbers of optimizer state; "
        f"reading {run.mixture_or_task_name}")
    batches = dataset(run, model.config, "train", run.seed).batch(settings.steps_per_call)
    state = State(model, optimizer, iter(batches))
    if not _restore(state, folder, say) and run.initial_checkpoint is not None:
        path = checkpoint_folders.resolve(run.initial_checkpoint)
        checkpoints.restore(path, checkpoints.state_variables(model))
        say(f"Starting from the weights of {path}.")
    return state


def _restore(state, folder, say) -> bool:
    """Takes up the newest checkpoint that can be read; False where there is none at all."""
    variables = checkpoints.state_variables(state.model, state.optimizer)
    broken = []
    for step in reversed(checkpoint_folders.steps(folder.checkpoints)):
        path = checkpoint_folders.path_of(folder.checkpoints, step)
        try:
            description = checkpoints.restore(path, variables, state.iterator)
        except checkpoint_folders.BrokenCheckpoint as error:
            say(f"{error} Trying the one before it.")
            broken.append(path)
            continue
        for newer in broken:
            say(f"{newer} is kept as {checkpoint_folders.set_aside(newer)}.")
        say(f"Going on from step {step} ({path}).")
        pending = description["pending_metrics"]
        state.step, state.sums = step, pending and metrics.from_json(pending)
        return True
    if broken:
        raise ValueError(f"No checkpoint in {str(folder.checkpoints)!r} can be read; move the folder away to start "
                         "anew, or restore it from a copy.")
    return False


def save(state: State, folder, keep: int, partitioner) -> None:
    """Writes the checkpoint of the state's step, unless it is there, and removes all but the newest `keep`."""
    checkpoints.save(folder.checkpoints, state.step, checkpoints.state_variables(state.model, state.optimizer),
                     state.iterator, state.sums and metrics.to_json(state.sums), keep, partitioner)
