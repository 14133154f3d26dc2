"""Trains a comparison, one seed after another. A seed's variants take turns on the same batches."""

import contextlib
import functools
import hashlib
import pathlib
import time
from collections.abc import Callable

from switch_tf.checkpoints import folders
from switch_tf.comparison import fairness
from switch_tf.comparison.description import Comparison, naming
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries
from switch_tf.storage import json_lines, places
from switch_tf.training.stopping import Stopping

# First steps of a turn, not timed.
_UNTIMED = 2


def train(comparison: Comparison, make_trainer: Callable) -> bool:
    """Trains every variant and seed to its last step, or until a signal or a notice asks to stop.

    Args:
        make_trainer: Maps (variant, seed) to (Trainer, text of its configuration).

    Returns:
        Whether all variants reached their last step.
    """
    stages = [list(comparison.trained_first), [name for name in comparison.variants
                                               if name not in comparison.trained_first]]
    with contextlib.ExitStack() as whole:
        progress = None
        for seed in comparison.seeds:
            records, configs = {}, {}  # kept when trainers, with their variables, are dropped
            for names in filter(None, stages):
                trainers, configurations = {}, {}
                for name in names:
                    with naming(name):
                        trainers[name], configurations[name] = make_trainer(name, seed)
                    records[name], configs[name] = trainers[name].configuration, trainers[name].model.config
                runs = [trainer.run for trainer in trainers.values()]
                fairness.check_records(records, comparison.may_differ)
                fairness.check_work(configs, runs[0].task_feature_lengths, comparison.unequal_work)
                num_steps = sum(run.train_steps for run in runs)
                # Variants that are made later count alike.
                progress = progress or whole.enter_context(contextlib.closing(Progress(
                    num_steps * len(comparison.variants) // len(names) * len(comparison.seeds))))
                if all(max(folders.steps(folders.checkpoints_of(run.model_dir)), default=-1) >= run.train_steps
                       for run in runs):
                    progress.advance(num_steps, is_trained=False)
                    subject = "all variants" if len(names) == len(comparison.variants) else " and ".join(names)
                    progress.say(f"Seed {seed}: {subject} {'is' if len(names) == 1 else 'are'} trained.")
                    continue
                batches_file = places.at(comparison.model_dir) / f"batches_{seed}.jsonl"
                with Stopping(progress.say) as stopping:
                    if not take_turns(trainers, configurations, progress, batches_file, comparison.turn, stopping):
                        return False
    return True


def take_turns(trainers: dict, configurations: dict[str, str], progress: "Progress", batches_file: pathlib.Path,
               turn: int, stopping: Stopping) -> bool:
    """Trains variants of a seed from their newest checkpoints to the last step.

    Args:
        trainers: Variant -> Trainer, not started.
        configurations: Variant -> text of its operative configuration.
        turn: Steps.

    Returns:
        Whether all variants reached their last step. Otherwise all are saved. If an error such as a Divergence ends a
        variant, the rest is saved, and the error names the variant.
    """
    with contextlib.ExitStack() as stack:
        train_steps = {name: trainer.run.train_steps for name, trainer in trainers.items()}
        trainings = {name: stack.enter_context(trainer.start(
            configurations[name], _OfVariant(progress, name, train_steps[name])))
            for name, trainer in trainers.items()}
        stopping.watch([*trainings.values()])
        batches, failure = SameBatches(batches_file), None
        while due := next_turn({name: training.state.step for name, training in trainings.items()}, train_steps, turn):
            name, end = due
            training = trainings[name]
            try:
                with naming(name):
                    training.advance(end, lambda: stopping.reason, _UNTIMED, functools.partial(batches.look, name))
                batches.write()
            except Exception as error:
                failure = error
                del trainings[name]
                break
            if training.state.step < end:
                break
        if due:  # saves all before any writes its report
            for training in trainings.values():
                training.save()
        for training in trainings.values():
            training.finish()
        if failure:
            raise failure
        return due is None


def next_turn(steps: dict[str, int], train_steps: dict[str, int], turn: int) -> tuple[str, int] | None:
    """Returns the next variant and the step to train it to, or None when all are done.

    Variants that are behind come first. Otherwise the order rotates. Turns end at multiples of `turn`.
    """
    behind = [name for name in steps if steps[name] < train_steps[name]]
    if not behind:
        return None
    index = min(steps[name] for name in behind) // turn
    first = index % len(steps)
    names = [*steps][first:] + [*steps][:first]
    name = next(name for name in names if name in behind and steps[name] // turn == index)
    return name, min((index + 1) * turn, train_steps[name])


class Progress(summaries.Progress):
    """A progress bar of all runs."""

    def __init__(self, num_steps: int):
        super().__init__(num_steps)
        self._done = 0
        self._trained = 0  # by this process
        self._started = time.perf_counter()

    def advance(self, steps: int, is_trained: bool = True) -> None:
        """Counts steps, trained by this process or before."""
        super().advance(steps)
        self._done += steps
        self._trained += steps * is_trained

    def remaining_seconds(self, step: int, seconds_per_step: float) -> float:
        """Estimates the time until all runs are done, evaluations and compilations included."""
        elapsed = time.perf_counter() - self._started
        return (self._last_step - self._done) * elapsed / max(1, self._trained)


class _OfVariant(summaries.Progress):
    """Adds the variant's name to lines, and moves the bar of all runs."""

    def __init__(self, whole, name, last_step):
        self._last_step = last_step
        self.advance, self.remaining_seconds = whole.advance, whole.remaining_seconds
        self.resume = functools.partial(whole.advance, is_trained=False)
        self.say = lambda text: whole.say(f"{name}: {text}")
        self.glance = self.close = lambda *_: None


class SameBatches:
    """Hashes of a seed's batches. The first variant at a step records the hash, and later ones must have the same.

    Hashes in the file of JSON lines still apply after a kill.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._new = path, []
        self._known = {record["step"]: record for _, record in json_lines.read(
            self._path, lambda record: json_lines.is_step(record.get("step")) and {"variant", "hash"} <= record.keys())}

    def look(self, variant: str, step: int, batches: dict) -> None:
        """Records a variant's batches after `step`, <int32>[steps, batch, length], or refuses a different one."""
        arrays = [(name.encode(), batches[name].numpy()) for name in sorted(batches)]
        for index in range(len(arrays[0][1])):
            content = b"".join(name + array[index].tobytes() for name, array in arrays)
            record = {"step": step + index, "variant": variant,
                      "hash": hashlib.blake2b(content, digest_size=8).hexdigest()}
            known = self._known.setdefault(step + index, record)
            if known is record:
                self._new.append(record)
            elif known["hash"] != record["hash"]:
                raise Refusal(f"The batch after step {step + index} of {variant!r} is not the one that "
                              f"{known['variant']!r} was given, so they cannot be compared: the data, or the order in "
                              "which they are read, changed. Start anew in another folder.")

    def write(self) -> None:
        """Appends new hashes to the file."""
        json_lines.append(self._path, self._new)
        self._new.clear()
