"""Folders of checkpoints, one a step: which there are, and what their descriptions say. Needs no TensorFlow.

`checkpoints/step_00000100/` holds

* `state.*`: every variable of model and optimizer by its path, unsharded, as TensorFlow writes checkpoints;
* `data_position*`: the state of the input iterator, of a cached task part by part;
* `data_position_later.json`, where the input was waiting for data: how many steps it is behind the position;
* `checkpoint.json`: format version, step, shape, dtype and logical axes of every variable, sizes of all files, the
  sums of metrics that were not logged yet, and the configuration (`continuation.record`; not of older versions).

`checkpoints/best.json` names the best one so far: `step`, `metric` and `value`, for a run with a BEST_METRIC.
"""

import hashlib
import math
import pathlib
import re
import shutil

from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, leftovers
from switch_tf.storage.whole_file import write_whole

FORMAT_VERSION = 3
_STEP = re.compile(r"step_([0-9]{8,})")
_BEST = "best.json"
# Bytes of a description that are read: a thousand times those of the largest model.
_LARGEST = 2**30
_OWNERS = ("model/", "optimizer/")  # what the path of a variable begins with
_LARGEST_RANK, _MOST_ELEMENTS = 254, 2**63 - 1  # TensorFlow's own limits


class BrokenCheckpoint(Refusal):
    """A checkpoint folder that is not what its checkpoint.json says."""


def steps(folder) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first."""
    entries = pathlib.Path(folder).iterdir() if pathlib.Path(folder).is_dir() else ()
    found = [(int(match[1]), entry) for entry in entries if (match := _STEP.fullmatch(entry.name))]
    # A name with more zeros than ours is not one of ours.
    return sorted(step for step, entry in found if entry.name == path_of(folder, step).name and entry.is_dir())


def path_of(folder, step: int) -> pathlib.Path:
    """The checkpoint folder of a step."""
    return pathlib.Path(folder) / f"step_{step:08d}"


def newest_first(folder) -> list[pathlib.Path]:
    """The checkpoints in a folder, in the order in which a run tries them."""
    return [path_of(folder, step) for step in reversed(steps(folder))]


def resolve(source) -> pathlib.Path:
    """The checkpoint folder that a user means by a run's folder (its newest), or by a checkpoint itself."""
    source = pathlib.Path(source)
    if (source / "checkpoint.json").exists():
        return source
    found = steps(source / "checkpoints")
    if not found:
        raise Refusal("INITIAL_CHECKPOINT must name a run folder with checkpoints, one checkpoint folder such as "
                      "runs/x/checkpoints/step_00000100, or a Hugging Face folder with config.json; "
                      f"{str(source)!r} is none of these.")
    return path_of(source / "checkpoints", found[-1])


def best(folder) -> dict | None:
    """`{"step", "metric", "value"}` of the best checkpoint in a folder; None where none is kept as such.

    A file that says something else, or has a value that is not finite, names none.
    """
    try:
        found = json_lines.load(pathlib.Path(folder) / _BEST, _LARGEST)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not json_lines.is_step(found.get("step")):
        return None
    is_whole = isinstance(found.get("metric"), str) and is_finite(found.get("value"))
    is_there = is_whole and found["step"] in steps(folder)
    return {name: found[name] for name in ("step", "metric", "value")} if is_there else None


def is_finite(value) -> bool:
    """Whether a value of a file is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def set_best(folder, step: int, metric: str, value: float) -> None:
    """Makes the existing checkpoint of a step the best one, atomically.

    Raises:
        Refusal: it cannot be written; the one before is named still.
    """
    write_whole(pathlib.Path(folder) / _BEST, json_lines.dumps({"step": step, "metric": metric, "value": value}))


def unset_best(folder) -> None:
    """Makes no checkpoint the best one."""
    leftovers.remove(pathlib.Path(folder) / _BEST)


def outdated(folder, keep: int, keep_every: int = 0) -> list[pathlib.Path]:
    """Checkpoints that are none of the newest `keep`, at no multiple of `keep_every` steps (0: any), not the best."""
    kept = best(folder)
    return [path_of(folder, step) for step in steps(folder)[:-keep]
            if not (keep_every and step % keep_every == 0) and not (kept and step == kept["step"])]


def describe(checkpoint) -> dict:
    """Reads `checkpoint.json` and checks that every file is there in its full size.

    Raises:
        BrokenCheckpoint: in one sentence, what is missing.
        Refusal: another version of the format.
    """
    checkpoint = pathlib.Path(checkpoint)
    try:
        description = json_lines.load(checkpoint / "checkpoint.json", _LARGEST)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json ({error}).") from error
    version = description.get("format_version") if isinstance(description, dict) else None
    if not json_lines.is_step(version) or version == 0:
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json (it is no description of a checkpoint).")
    if version != FORMAT_VERSION:
        raise Refusal(f"{checkpoint} has format {version}; this version of switch_tf reads "
                      f"format {FORMAT_VERSION}, so use the version that wrote it.")
    for name, is_right in _PARTS.items():
        if not is_right(description.get(name)):
            raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json ({name!r} is missing or damaged).")
    for name, size in description["files"].items():
        file = checkpoint / name
        found = _size(file)
        if found != size:
            raise BrokenCheckpoint(f"{file} should have {size} bytes but has {found}.")
    match = _STEP.fullmatch(checkpoint.name)
    if match and int(match[1]) != description["step"]:
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json (it is of step {description['step']}).")
    return {"configuration": {}, "pending_metrics": None,
            **{name: value for name, value in description.items() if value is not None}}


def is_whole(checkpoint) -> bool:
    """Whether `describe` accepts a checkpoint."""
    try:
        describe(checkpoint)
    except Refusal:
        return False
    return True


def _size(file):
    """Returns the size of a file in bytes, or "nothing" if there is no such file."""
    try:
        return file.stat().st_size if file.is_file() else "nothing"
    except (OSError, ValueError):  # a name that no file can have
        return "nothing"


def _are_variables(found):
    return isinstance(found, dict) and all(
        path.startswith(_OWNERS) and _is_variable(variable) for path, variable in found.items())


def _is_variable(found):
    if not isinstance(found, dict) or not isinstance(found.get("dtype"), str):
        return False
    shape, unfolded = found.get("shape"), found.get("unfolded", [])
    return (_is_shape(shape) and isinstance(found.get("logical_axes", []), list) and isinstance(unfolded, list)
            and all(_are_sizes(pair) and len(pair) == 2 and pair[0] < len(shape) and pair[1] for pair in unfolded))


def _is_shape(found):
    return _are_sizes(found) and len(found) <= _LARGEST_RANK and math.prod(found) <= _MOST_ELEMENTS


def _are_sizes(found):
    return isinstance(found, list) and all(map(json_lines.is_step, found))


def _is_configuration(found):
    """A record of `continuation`, or none; fingerprints of data are objects."""
    return found is None or isinstance(found, dict) and all(
        isinstance(found.get(name, {}), dict) for name in ("training data", "held-out data"))


def _are_files(found):
    return isinstance(found, dict) and all(map(json_lines.is_step, found.values()))


# Parts of a description that other modules read, and a check of each.
_PARTS = {
    "step": json_lines.is_step,
    "variables": _are_variables,
    "files": _are_files,
    "configuration": _is_configuration,
    "pending_metrics": lambda found: found is None or isinstance(found, dict),
}


def hash_of_weights(checkpoint) -> str:
    """What tells the values of a checkpoint from others: SHA-256 of its index, which holds every tensor's checksum."""
    return hashlib.sha256((pathlib.Path(checkpoint) / "state.index").read_bytes()).hexdigest()


def set_aside(checkpoint) -> pathlib.Path:
    """Renames a broken checkpoint, so that its step can be saved again; returns its new place.

    Another broken one of the same step goes.
    """
    checkpoint = pathlib.Path(checkpoint)
    before = checkpoint.with_name(f"broken.{checkpoint.name}")
    if before.is_dir() and not before.is_symlink():
        shutil.rmtree(before, ignore_errors=True)
    return leftovers.set_aside(checkpoint)
