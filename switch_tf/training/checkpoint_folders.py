"""Folders of checkpoints, one a step: which there are, and what their descriptions say. Needs no TensorFlow.

`checkpoints/step_00000100/` holds

* `state.*`: every variable of model and optimizer by its path, unsharded, as TensorFlow writes checkpoints;
* `data_position*`: the state of the input iterator, of a cached task part by part;
* `checkpoint.json`: format version, step, shape, dtype and logical axes of every variable, sizes of all files, the
  sums of metrics that were not logged yet, and the configuration (`continuation.record`; not of older versions).

`checkpoints/best.json` says which of them was the best one so far, where a run looks for it.
"""

import hashlib
import json
import pathlib
import re
import shutil

from switch_tf.whole_file import write_whole

FORMAT_VERSION = 3
# What of a description is read by others.
_KINDS = {"step": int, "variables": dict, "files": dict}
_STEP = re.compile(r"step_(\d{8,})")


_BEST = "best.json"


class BrokenCheckpoint(Exception):
    """A checkpoint folder that is not what its checkpoint.json says."""


def steps(folder) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first."""
    names = [entry.name for entry in pathlib.Path(folder).iterdir()] if pathlib.Path(folder).is_dir() else []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


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
        raise ValueError("INITIAL_CHECKPOINT must name a run folder with checkpoints, one checkpoint folder such as "
                         "runs/x/checkpoints/step_00000100, or a Hugging Face folder with config.json; "
                         f"{str(source)!r} is none of these.")
    return path_of(source / "checkpoints", found[-1])


def best(folder) -> dict | None:
    """`{"step", "metric", "value"}` of the best checkpoint in a folder; None where none is kept as such."""
    try:
        found = json.loads((pathlib.Path(folder) / _BEST).read_text())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(found, dict) and isinstance(found.get("step"), int)
    return found if is_whole and path_of(folder, found["step"]).is_dir() else None


def set_best(folder, step: int, metric: str, value: float) -> None:
    """Makes the checkpoint of a step, which is there, the best one, in one step."""
    write_whole(pathlib.Path(folder) / _BEST, json.dumps({"step": step, "metric": metric, "value": value}))


def outdated(folder, keep: int, keep_every: int = 0) -> list[pathlib.Path]:
    """Checkpoints that are none of the newest `keep`, at no multiple of `keep_every` steps (0: any), not the best."""
    kept = best(folder)
    return [path_of(folder, step) for step in steps(folder)[:-keep]
            if not (keep_every and step % keep_every == 0) and not (kept and step == kept["step"])]


def describe(checkpoint) -> dict:
    """Reads `checkpoint.json` and checks that every file is there in its full size.

    Raises:
        BrokenCheckpoint: in one sentence, what is missing.
        ValueError: another version of the format.
    """
    checkpoint = pathlib.Path(checkpoint)
    try:
        description = json.loads((checkpoint / "checkpoint.json").read_text())
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json ({error}).") from error
    if not isinstance(description, dict) or not isinstance(description.get("format_version"), int):
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json (it is no description of a checkpoint).")
    if description["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{checkpoint} has format {description['format_version']}; this version of switch_tf reads "
                         f"format {FORMAT_VERSION}, so use the version that wrote it.")
    for name, kind in _KINDS.items():
        if not isinstance(description.get(name), kind):
            raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json ({name!r} is missing or damaged).")
    for name, size in description["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else "nothing"
        if found != size:
            raise BrokenCheckpoint(f"{file} should have {size} bytes but has {found}.")
    return description


def hash_of_weights(checkpoint) -> str:
    """What tells the values of a checkpoint from others: SHA-256 of its index, which holds every tensor's checksum."""
    return hashlib.sha256((pathlib.Path(checkpoint) / "state.index").read_bytes()).hexdigest()


def set_aside(checkpoint) -> pathlib.Path:
    """Renames a broken checkpoint, so that its step can be saved again; returns its new place."""
    checkpoint = pathlib.Path(checkpoint)
    aside = checkpoint.with_name(f"broken.{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)
