"""All variants of one seed, trained a few steps each in turn, so that a busy machine harms all alike."""

import contextlib

from switch_tf.comparison.description import naming
from switch_tf.comparison.progress import OfVariant, Progress
from switch_tf.comparison.same_batches import SameBatches

# Steps at the beginning of a turn that are left out of the timing.
_UNTIMED = 2


def next_turn(steps: dict[str, int], train_steps: dict[str, int], turn: int) -> tuple[str, int] | None:
    """Whose turn it is, and to which step: laggards first, else in an order that rotates; None when all are done.

    Args:
        steps: variant -> the step that it has reached.
        train_steps: variant -> its last step.
        turn: int, steps of a turn, which ends at multiples of it.
    """
    behind = [name for name in steps if steps[name] < train_steps[name]]
    if not behind:
        return None
    index = min(steps[name] for name in behind) // turn
    first = index % len(steps)
    names = [*steps][first:] + [*steps][:first]
    name = next(name for name in names if name in behind and steps[name] // turn == index)
    return name, min((index + 1) * turn, train_steps[name])


def train(trainers: dict, configurations: dict[str, str], progress: Progress, batches_file, turn: int,
          stop_reason=lambda: None) -> bool:
    """Trains the variants of one seed from wherever their run folders stand to the last step.

    Args:
        trainers: variant -> Trainer, of which none was started.
        configurations: variant -> text of its operative configuration.
        progress: Progress, of the whole comparison.
        batches_file: path, of the hashes of all batches; see `SameBatches`.
        turn: int, steps.
        stop_reason: see `Training.advance`.

    Returns:
        Whether all got to their last step; otherwise all are saved where they are.

    Raises:
        Refusal: a mistake of the user, such as a Divergence, ended a variant, which the sentence names. The other
            variants are saved.
    """
    with contextlib.ExitStack() as stack:
        trainings = {name: stack.enter_context(trainer.start(
            configurations[name], OfVariant(progress, name, trainer.run.train_steps)))
            for name, trainer in trainers.items()}
        train_steps = {name: trainer.run.train_steps for name, trainer in trainers.items()}
        batches = SameBatches(batches_file)

        def due():
            return next_turn({name: training.state.step for name, training in trainings.items()}, train_steps, turn)

        while turn_of := due():
            name, end = turn_of
            training = trainings[name]
            try:
                with naming(name):
                    training.advance(end, stop_reason, _UNTIMED,
                                     lambda step, features, name=name: batches.look(name, step, features))
            except Exception:
                for other in trainings.keys() - {name}:
                    trainings[other].finish()
                raise
            batches.write()
            if training.state.step < end:
                break
        for training in trainings.values():
            training.finish()
        return turn_of is None
