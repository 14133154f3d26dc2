"""Checkpoints that models are made from, chosen and compared by their descriptions. Needs no TensorFlow."""

from typing import Any

from switch_tf.checkpoints import continuation, folders
from switch_tf.checkpoints.run_folder import select, select_one
from switch_tf.conversion import formats
from switch_tf.conversion.formats import Format
from switch_tf.refusals import Refusal


def checkpoint_in(source: Any, source_format: Format) -> Any:
    """Returns the newest checkpoint of a run folder, and any other folder of weights unchanged.

    Raises:
        Refusal: The run folder has no checkpoint.
    """
    if source_format is not formats.SWITCH_TF or (source / folders.DESCRIPTION).exists():
        return source
    return select_one(source, "last")


def newest(run_folder: Any, count: int) -> list[Any]:
    """Returns the newest checkpoints of a run, oldest first.

    Raises:
        Refusal: The folder is no run folder, or has too few checkpoints.
    """
    if not (run_folder / "checkpoints").is_dir():
        raise Refusal(f"--run must name a run folder, which holds checkpoints; {str(run_folder)!r} does not.")
    found = select(run_folder, "all")
    if len(found) < count:
        raise Refusal(f"--last must be at most {len(found)}, the number of checkpoints in {str(run_folder)!r}, not "
                      f"{count}; a run keeps more of them with --gin.Run.keep_checkpoints=N.")
    return found[-count:]


def check_same(checkpoints: list[Any]) -> None:
    """Raises Refusal for the first difference between the models of checkpoints.

    Raises:
        BrokenCheckpoint: A checkpoint is damaged.
    """
    first, *others = [(checkpoint, folders.describe(checkpoint)) for checkpoint in checkpoints]
    for checkpoint, description in others:
        difference = continuation.model_difference(first[1]["configuration"], description["configuration"])
        if difference := difference or _shape_difference(first[1]["variables"], description["variables"]):
            raise Refusal(f"{checkpoint} is of another model than {first[0]}: {difference}. Average checkpoints of one "
                          "model.")


def _shape_difference(first, second):
    """Returns the first weight with another shape in the second of two descriptions, None if there is none."""
    shapes = [{path: saved["shape"] for path, saved in variables.items() if path.startswith("model/")}
              for variables in (first, second)]
    different = [path for path in shapes[0] | shapes[1] if shapes[0].get(path) != shapes[1].get(path)]
    if not different:
        return None
    was, is_ = (one.get(different[0], "not there") for one in shapes)
    return f"{different[0]} was {was} and is {is_}"
