"""Trains all variants of a seed a few steps each in turn, so that a busy machine slows all alike."""

import contextlib
import pathlib

from switch_tf.comparison.description import naming
from switch_tf.comparison.progress import OfVariant, Progress
from switch_tf.comparison.same_batches import SameBatches
from switch_tf.training.stopping import Stopping

# Steps at the beginning of a turn that are not timed.
_UNTIMED = 2


def next_turn(steps: dict[str, int], train_steps: dict[str, int], turn: int) -> tuple[str, int] | None:
    """Returns the next variant and the step to train it to, None when all are done.

    Variants that are behind come first. Otherwise the order rotates.

    Args:
        steps: dict, variant -> its current step.
        train_steps: dict, variant -> its last step.
        turn: int. Number of steps of a turn, which ends at a multiple of it.
    """
    behind = [name for name in steps if steps[name] < train_steps[name]]
    if not behind:
        return None
    index = min(steps[name] for name in behind) // turn
    first = index % len(steps)
    names = [*steps][first:] + [*steps][:first]
    name = next(name for name in names if name in behind and steps[name] // turn == index)
    return name, min((index + 1) * turn, train_steps[name])


def train(trainers: dict, configurations: dict[str, str], progress: Progress, batches_file: str | pathlib.Path,
          turn: int, stopping: Stopping) -> bool:
    """Trains the variants of a seed from their newest checkpoints to the last step.

    Args:
        trainers: dict, variant -> Trainer that was not started.
        configurations: dict, variant -> text of its operative configuration.
        progress: Progress of the comparison.
        batches_file: Path of the hashes of all batches, see `SameBatches`.
        turn: int. Number of steps of a turn.
        stopping: Stopping.

    Returns:
        Whether all variants reached their last step. Otherwise all are saved at their current steps.

    Raises:
        Refusal: a mistake of the user, such as a Divergence, ended a variant, which the sentence names. The other
            variants are saved.
    """
    with contextlib.ExitStack() as stack:
        trainings = {name: stack.enter_context(trainer.start(
            configurations[name], OfVariant(progress, name, trainer.run.train_steps)))
            for name, trainer in trainers.items()}
        stopping.watch([*trainings.values()])
        train_steps = {name: trainer.run.train_steps for name, trainer in trainers.items()}
        batches = SameBatches(batches_file)

        def due():
            return next_turn({name: training.state.step for name, training in trainings.items()}, train_steps, turn)

        while turn_of := due():
            name, end = turn_of
            training = trainings[name]
            try:
                with naming(name):
                    training.advance(end, lambda: stopping.reason, _UNTIMED,
                                     lambda step, features, name=name: batches.look(name, step, features))
            except Exception:
                others = [trainings[other] for other in trainings.keys() - {name}]
                for other in others:
                    other.save()
                for other in others:
                    other.finish()
                raise
            batches.write()
            if training.state.step < end:
                break
        if turn_of:  # before any of them writes its report
            for training in trainings.values():
                training.save()
        for training in trainings.values():
            training.finish()
        return turn_of is None
