"""The checkpoints that a user selects by a word or a step."""

import pathlib

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.refusals import Refusal


def select(run_folder: str | pathlib.Path, step: str, hint: str = "") -> list[pathlib.Path]:
    """Returns checkpoint folders of a run, oldest first.

    Args:
        run_folder: Path of the run folder.
        step: A step, "best", "last" or "all".
        hint: End of the sentence that refuses a run without checkpoints.

    Raises:
        Refusal: The run has no checkpoint, or not the selected one.
    """
    checkpoints = RunFolder.checkpoints_of(run_folder)
    saved = folders.steps(checkpoints)
    if not saved:
        raise Refusal(f"The run folder {str(run_folder)!r} has no checkpoint yet; train it first{hint}.")
    if step == "all":
        selected = saved
    elif step == "last":
        selected = saved[-1:]
    elif step == "best":
        best = folders.best(checkpoints)
        if best is None:
            raise Refusal(f"The run in {str(run_folder)!r} keeps no best checkpoint; give --step=last, or train it "
                          "with --gin.BEST_METRIC=\"'eval/<task>/<metric>'\".")
        selected = [best["step"]]
    elif step.isdecimal() and int(step) in saved:
        selected = [int(step)]
    else:
        raise Refusal(f"--step must be best, last, all or a step with a checkpoint ({', '.join(map(str, saved))}), "
                      f"not {step!r}.")
    return [folders.path_of(checkpoints, step) for step in selected]


def select_one(run_folder: str | pathlib.Path, step: str) -> pathlib.Path:
    """Returns the checkpoint folder that `step` means, see `select`; refuses "all"."""
    if step == "all":
        raise Refusal("--step must be best, last or a step: one checkpoint answers, not 'all'.")
    return select(run_folder, step)[0]
