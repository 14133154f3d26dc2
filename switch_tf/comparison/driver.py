"""The training of a comparison: one seed after another, the variants of a seed in turns."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import fairness, turns
from switch_tf.comparison.description import Comparison, naming
from switch_tf.comparison.progress import Progress
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.storage import places
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


class _Described(NamedTuple):
    """The parts of a variant that comparability depends on, without the variables that its trainer holds."""

    record: dict
    config: SwitchConfig


def _train_seed(comparison, seed, make_trainer, progress):
    """Trains the variants of a seed, those of `trained_first` before the others."""
    described = {}
    others = [name for name in comparison.variants if name not in comparison.trained_first]
    for names in (list(comparison.trained_first), others):
        if names and not _train_together(comparison, names, seed, make_trainer, progress, described):
            return False
    return True


def _train_together(comparison, names, seed, make_trainer, progress, described):
    with contextlib.ExitStack() as stack:
        trainers, configurations = {}, {}
        for name in names:
            with naming(name):
                trainers[name], configurations[name] = make_trainer(name, seed, stack)
            described[name] = _Described(trainers[name].configuration, trainers[name].model.config)
        fairness.check_records({name: of.record for name, of in described.items()}, comparison.may_differ)
        fairness.check_work({name: of.config for name, of in described.items()},
                            trainers[name].run.task_feature_lengths, comparison.unequal_work)
        num_steps = sum(trainer.run.train_steps for trainer in trainers.values())
        # The steps of variants that are made later are taken for as many.
        progress.begin(num_steps * len(comparison.variants) // len(names) * len(comparison.seeds))
        if all(_is_done(trainer.run) for trainer in trainers.values()):
            progress.skip(num_steps)
            subject = "all variants" if len(names) == len(comparison.variants) else " and ".join(names)
            progress.say(f"Seed {seed}: {subject} {'is' if len(names) == 1 else 'are'} trained.")
            return True
        stopping = stack.enter_context(Stopping(progress.say))
        batches_file = places.at(comparison.model_dir) / f"batches_{seed}.jsonl"
        return turns.train(trainers, configurations, progress, batches_file, comparison.turn, stopping)


def _is_done(run):
    saved = folders.steps(RunFolder.checkpoints_of(run.model_dir))
    return bool(saved) and saved[-1] >= run.train_steps
