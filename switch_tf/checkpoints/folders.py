"""Checkpoint folders and their descriptions. Needs no TensorFlow.

`checkpoints/step_00000100/` holds

* `state.*`: every variable of model and optimizer by its path, unsharded, in TensorFlow's format;
* `data_position*`: the state of the input iterator, for a cached task in parts;
* `data_position*.later.json`, if the input was waiting for data: its steps behind the position;
* `checkpoint.json`: format version, step, variables, size and SHA-256 of every file (format 3: size only), sums of
  metrics since the last logged step, the configuration (`continuation.record`), the fingerprints of its vocabularies,
  the layout, the versions that wrote it, and the SHA-256 of all this.

`checkpoints/best.json` names the best checkpoint of a run with a BEST_METRIC.
"""

import hashlib
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, leftovers, places
from switch_tf.storage.whole_file import write_whole

FORMAT_VERSION = 4
_READABLE = (3, 4)
DESCRIPTION = "checkpoint.json"
OWN_SUM = "sha256"
_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
_BEST = "best.json"
# bytes; a thousand times the largest model's description
_LARGEST = 2**30
MODEL = "model/"  # prefix of a weight's path
_OWNERS = (MODEL, "optimizer/")
_WAY_OUT = "copy it again, or use another checkpoint"
_LARGEST_RANK, _MOST_ELEMENTS = 254, 2**63 - 1  # TensorFlow's own limits

Folder = str | pathlib.Path
_BLOCK = 2**22  # bytes to read at a time


class BrokenCheckpoint(Refusal):
    """A checkpoint folder that is damaged or disagrees with its checkpoint.json."""


def checkpoints_of(run_folder: Folder) -> Any:
    """Returns the folder of a run folder's checkpoints."""
    return places.at(run_folder) / "checkpoints"


def steps(folder: Any) -> list[int]:
    """Returns the steps of the checkpoints in a folder, oldest first."""
    if not places.is_local(folder):
        names = [url.split("/")[-2] for url in places.urls_of(folder) if url.endswith(f"/{DESCRIPTION}")]
    else:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def is_complete(checkpoint: Any) -> bool:
    """Whether the folder of a step holds a checkpoint.

    On a disk the folder suffices. In a bucket the description, written last, decides.
    """
    if places.is_local(checkpoint):
        return checkpoint.is_dir()
    return places.read_object(checkpoint / DESCRIPTION)[0] is not None  # TensorFlow caches removed files for seconds


def path_of(folder: Any, step: int) -> Any:
    """Returns the checkpoint folder of a step."""
    return folder / f"step_{step:08d}"


def newest_first(folder: Any) -> list[Any]:
    """Returns the checkpoints in a folder, newest first."""
    return [path_of(folder, step) for step in reversed(steps(folder))]


def described(folder: Any,
              on_broken: Callable[[Any, BrokenCheckpoint], None] = lambda path, error: None,
              ) -> Iterator[tuple[Any, dict]]:
    """Yields the undamaged checkpoints in a folder with their descriptions, newest first.

    Args:
        on_broken: Called with the path of each damaged checkpoint and the error.
    """
    for path in newest_first(folder):
        try:
            yield path, describe(path)
        except BrokenCheckpoint as error:
            on_broken(path, error)


def resolve(source: Folder) -> Any:
    """Returns the newest checkpoint of a run folder, or a checkpoint folder itself."""
    if checkpoints := checkpoints_in(source):
        return checkpoints[-1]
    raise Refusal("INITIAL_CHECKPOINT must name a run folder with checkpoints, one checkpoint folder such as "
                  "runs/x/checkpoints/step_00000100, a Hugging Face folder with config.json, or a checkpoint of "
                  f"T5X or Mesh TensorFlow; {str(source)!r} is none of these.")


def run_folder_of(source: Folder) -> Any:
    """Returns the run folder of a checkpoint, and any other folder unchanged."""
    source = places.at(source)
    return source.parent.parent if (source / DESCRIPTION).is_file() and source.parent.name == "checkpoints" else source


def best(folder: Any) -> dict | None:
    """Returns `{"step", "metric", "value"}` of the best checkpoint, or None."""
    try:
        entry = json_lines.load(folder / _BEST)
    except places.BucketError:
        raise
    except (OSError, ValueError):
        return None
    is_best = (isinstance(entry, dict) and json_lines.is_step(entry.get("step")) and is_finite(entry.get("value"))
               and isinstance(entry.get("metric"), str) and entry["step"] in steps(folder))
    return {name: entry[name] for name in ("step", "metric", "value")} if is_best else None


def is_finite(value: Any) -> bool:
    """Whether a value from a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def set_best(folder: Any, **best: Any) -> None:
    """Records an existing checkpoint as the best, atomically.

    Args:
        best: `step`, `metric` and `value`, or empty.
    """
    if best:
        write_whole(folder / _BEST, json_lines.dumps(best))
    else:
        leftovers.remove(folder / _BEST)


def outdated(folder: Any, keep: int, keep_every: int = 0) -> list[Any]:
    """Returns the checkpoints to remove: all but the newest, the best, and multiples of `keep_every`.

    Args:
        keep: Number of recent checkpoints to keep.
        keep_every: 0 keeps no multiples.
    """
    kept = best(folder)
    return [path_of(folder, step) for step in steps(folder)[:-keep]
            if not (keep_every and step % keep_every == 0) and not (kept and step == kept["step"])]


def describe(checkpoint: Any) -> dict:
    """Reads `checkpoint.json` and checks the size of every file.

    The result's "files" has the "size" and "sha256" (None in format 3) of each file.

    Raises:
        BrokenCheckpoint: A file is missing or damaged.
        BucketError: The bucket does not answer.
    """
    try:
        description = json_lines.load(checkpoint / DESCRIPTION, _LARGEST)
        version = description.get("format_version") if isinstance(description, dict) else None
        if not json_lines.is_step(version) or version == 0:
            raise ValueError("it is no description of a checkpoint")
        recorded = description.pop(OWN_SUM, None)
        is_same = recorded is None or recorded == own_sum(description)
        if not is_same:
            raise ValueError("its SHA-256 is not the recorded one")
        if version not in _READABLE:
            raise Refusal(f"{checkpoint} has format {version}; this version of switch_tf reads formats "
                          f"{' and '.join(map(str, _READABLE))}, so use the version that wrote it.")
        for name, is_right in _PARTS.items():
            if not is_right(description.get(name)):
                raise ValueError(f"{name!r} is missing or damaged")
        match = _STEP.fullmatch(checkpoint.name)
        if match and int(match[1]) != description["step"]:
            raise ValueError(f"it is of step {description['step']}")
    except (places.BucketError, Refusal):
        raise
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json ({error}); {_WAY_OUT}.") from error
    files = {name: entry if isinstance(entry, dict) else {"size": entry, "sha256": None}
             for name, entry in description["files"].items()}
    for name, entry in files.items():
        file, actual_size = checkpoint / name, "nothing"
        try:
            if file.is_file():
                actual_size = places.size(file)
        except places.BucketError:
            raise
        except (OSError, ValueError):  # an impossible file name
            pass
        if actual_size != entry["size"]:
            raise BrokenCheckpoint(f"{file} should have {entry['size']} bytes but has {actual_size}; {_WAY_OUT}.")
    return {"configuration": {}, "pending_metrics": None,
            **{name: value for name, value in description.items() if value is not None}, "files": files}


def own_sum(description: dict) -> str:
    """Returns the SHA-256 of a description read from JSON, without this sum."""
    return hashlib.sha256(json_lines.dumps(description, sort_keys=True).encode()).hexdigest()


def identity(description: dict) -> str:
    """Returns a text that identifies a checkpoint, also after a move."""
    return f"step {description['step']}, {own_sum({'files': description['files']})[:16]}"


def remove(checkpoint: Any) -> None:
    """Removes a checkpoint, in a bucket its description first. A failure prints a warning."""
    if not places.is_local(checkpoint):
        leftovers.remove(checkpoint / DESCRIPTION)
    leftovers.remove(checkpoint)


def remove_unfinished(folder: Any) -> None:
    """Removes unfinished checkpoints of killed runs: `tmp.*`, or in a bucket without a description."""
    is_local = places.is_local(folder)
    whole = set() if is_local else {path.name for path in newest_first(folder)}
    for entry in sorted(folder.iterdir()):
        name = entry.name.removeprefix("tmp.")
        if _STEP.fullmatch(name) and (name != entry.name or not is_local and name not in whole):
            leftovers.remove(entry)


def is_whole(checkpoint: Any) -> bool:
    """Whether `describe` accepts a checkpoint."""
    try:
        describe(checkpoint)
    except Refusal:
        return False
    return True


def is_shape(value: Any) -> bool:
    """Whether a value is a shape within TensorFlow's limits."""
    return _are_sizes(value) and len(value) <= _LARGEST_RANK and math.prod(value) <= _MOST_ELEMENTS


def _are_sizes(value):
    return isinstance(value, list) and all(map(json_lines.is_step, value))


def _is_variable(value):
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        return False
    shape, unfolded = value.get("shape"), value.get("unfolded", [])
    return is_shape(shape) and isinstance(unfolded, list) and all(
        _are_sizes(pair) and len(pair) == 2 and pair[0] < len(shape) and pair[1] for pair in unfolded)





# Entry of a description that other modules read -> its check.
_PARTS = {
    "step": json_lines.is_step,
    "variables": lambda value: isinstance(value, dict) and all(
        path.startswith(_OWNERS) and _is_variable(variable) for path, variable in value.items()),
    "files": lambda value: isinstance(value, dict) and all(
        json_lines.is_step(entry) or isinstance(entry, dict) and json_lines.is_step(entry.get("size"))
        and isinstance(entry.get("sha256"), str) for entry in value.values()),
    # None, or a record of `continuation`.
    "configuration": lambda value: value is None or isinstance(value, dict) and all(
        isinstance(value.get(name, {}), dict) for name in ("training data", "held-out data")),
    "pending_metrics": lambda value: isinstance(value, dict | None),
}


def hash_of_weights(checkpoint: Any) -> str:
    """Returns the SHA-256 of a checkpoint's index, with the checksums of all tensors."""
    return hashlib.sha256(places.content(checkpoint / "state.index", _LARGEST)).hexdigest()


def set_aside(checkpoint: Any) -> Any:
    """Renames a broken checkpoint, to save its step again; replaces an earlier one."""
    before = checkpoint.with_name(f"broken.{checkpoint.name}")
    if before.is_dir() and not before.is_symlink():
        leftovers.remove(before)
    return leftovers.set_aside(checkpoint)


class Finding(NamedTuple):
    """The result of reading one checkpoint.

    Attributes:
        damage: Sentence about the first damaged file, or None.
        has_sums: Whether the description has sums, unlike format 3.
    """

    checkpoint: Any
    damage: str | None
    num_bytes: int = 0
    has_sums: bool = True

    def __str__(self):
        if self.damage:
            return f"{self.checkpoint} is damaged: {self.damage}"
        if not self.has_sums:
            return f"{self.checkpoint} has files of the right sizes; its format has no sums to compare them with."
        return f"{self.checkpoint} is whole."


def checkpoints_in(folder: Folder) -> list[Any]:
    """Returns the checkpoints of a run folder, oldest first, a checkpoint folder itself, or []."""
    folder = places.at(folder)
    if (folder / DESCRIPTION).exists():
        return [folder]
    return newest_first(folder / "checkpoints")[::-1] or (
        [folder] if _STEP.fullmatch(folder.name) and is_complete(folder) else [])


def num_bytes_of(checkpoint: Any) -> int:
    """Returns the bytes of all files, or 0 without a readable description."""
    try:
        return _size_of(describe(checkpoint)["files"])
    except Refusal:
        return 0


def verify(checkpoint: Any, on_read: Callable[[int], object]) -> Finding:
    """Reads the files of a checkpoint up to the first damaged one.

    Args:
        on_read: Called with the bytes of each block.
    """
    try:
        files = describe(checkpoint)["files"]
    except Refusal as error:
        return Finding(checkpoint, str(error))
    for name, entry in files.items():
        if damage := _damage(checkpoint / name, entry, on_read):
            return Finding(checkpoint, damage)
    return Finding(checkpoint, None, _size_of(files), all(entry["sha256"] for entry in files.values()))


def _size_of(files):
    return sum(entry["size"] for entry in files.values())


def check_positions(checkpoint: Any, description: dict) -> None:
    """Compares files that TensorFlow does not check, such as the data position, with their recorded sums.

    TensorFlow checks tensors against the index, so the index is compared too.

    Raises:
        BrokenCheckpoint: A file is damaged, or belongs to another checkpoint.
        BucketError: The bucket does not answer.
    """
    for name, entry in description["files"].items():
        is_checked = name.startswith("state.data") or entry["sha256"] is None
        if not is_checked and (damage := _damage(checkpoint / name, entry)):
            raise BrokenCheckpoint(f"{checkpoint} is damaged: {damage}")


def _damage(file, entry, on_read=lambda num_bytes: None):
    try:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
                on_read(len(block))
    except places.BucketError:
        raise
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror or error})."
    if entry["sha256"] in (None, digest.hexdigest()):
        return None
    return f"{file.name} has the SHA-256 {digest.hexdigest()} and not {entry['sha256']}."


def check_size(config: SwitchConfig, checkpoint: Any) -> None:
    """Refuses a checkpoint, possibly a stranger's, with fewer bytes than the model has parameters.

    Raises:
        BrokenCheckpoint: The checkpoint is damaged.
    """
    describe(checkpoint)
    held = sum(file.stat().st_size for file in checkpoint.glob("state.data-*"))
    if config.num_parameters > held:
        raise Refusal(f"The configuration describes a model of {config.num_parameters:,} parameters, and the "
                      f"weights of {checkpoint} have {held:,} bytes, so they are of another model.")


def summary(checkpoint: Any) -> dict:
    """Returns the `step`, `num_parameters` and `bytes` of a checkpoint folder.

    The bytes are "weights" and "optimizer" as float32, whatever their dtype, and all files, "on_disk".
    """
    description = describe(checkpoint)
    sizes = {"model": 0, "optimizer": 0}
    for path, variable in description["variables"].items():
        sizes[path.partition("/")[0]] += math.prod(variable["shape"])
    return {"step": description["step"], "num_parameters": sizes["model"],
            "bytes": {"weights": 4 * sizes["model"], "optimizer": 4 * sizes["optimizer"],
                      "on_disk": _size_of(description["files"])}}
