"""The training of a comparison: one seed after another, the variants of a seed in turns."""

import contextlib
from collections.abc import Callable

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import fairness, turns
from switch_tf.comparison.description import Comparison, naming
from switch_tf.comparison.progress import Progress
from switch_tf.storage import places
from switch_tf.training.notices import Notices
from switch_tf.training.stopping import Stopping


def train(comparison: Comparison, make_trainer: Callable) -> bool:
    """Trains every variant and seed to its last step, or until a signal or a notice asks to stop.

    Args:
        comparison: Variants and seeds.
        make_trainer: Function of (variant, seed, stack) to (Trainer, text of its configuration). It enters the
            contexts that the trainer needs until it starts into `stack`, a `contextlib.ExitStack`.

    Returns:
        Whether all variants reached their last step.

    Raises:
        Refusal: The variants are not comparable, or one of them failed because of a mistake of the user.
    """
    with contextlib.closing(Progress()) as progress:
        return all(_train_seed(comparison, seed, make_trainer, progress) for seed in comparison.seeds)


def _train_seed(comparison, seed, make_trainer, progress):
    with contextlib.ExitStack() as stack:
        trainers, configurations = {}, {}
        for name in comparison.variants:
            with naming(name):
                trainers[name], configurations[name] = make_trainer(name, seed, stack)
        _check_comparable(comparison, trainers)
        num_steps = sum(trainer.run.train_steps for trainer in trainers.values())
        progress.begin(num_steps * len(comparison.seeds))
        if all(_is_done(trainer.run) for trainer in trainers.values()):
            progress.skip(num_steps)
            progress.say(f"Seed {seed}: all variants are trained.")
            return True
        stopping = stack.enter_context(Stopping(progress.say))
        notices = stack.enter_context(Notices(progress.say))
        batches_file = places.at(comparison.model_dir) / f"batches_{seed}.jsonl"
        return turns.train(trainers, configurations, progress, batches_file, comparison.turn,
                           lambda: stopping.reason or notices.reason)


def _check_comparable(comparison, trainers):
    first = next(iter(trainers.values()))
    fairness.check_records({name: trainer.configuration for name, trainer in trainers.items()}, comparison.may_differ)
    fairness.check_work({name: trainer.model.config for name, trainer in trainers.items()},
                        first.run.task_feature_lengths, comparison.unequal_work)


def _is_done(run):
    saved = folders.steps(RunFolder.checkpoints_of(run.model_dir))
    return bool(saved) and saved[-1] >= run.train_steps
