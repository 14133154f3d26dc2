"""Decides which checkpoint a run resumes from, or which weights it starts from."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from switch_tf.checkpoints import continuation, folders, tensors
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.refusals import Refusal
from switch_tf.training import keeping


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


def check(run: Run, configuration: dict[str, Any], initial: Any) -> None:
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
    """Returns the vocabularies of a checkpoint's run and of this run in words; None if equal or not kept there."""
    if saved.get("vocabulary") == configuration["vocabulary"]:
        return None
    before = keeping.kept_vocabulary_in_words(checkpoint.parent.parent, saved.get("vocabulary", []))
    return before and (before, keeping.vocabulary_in_words(run))
