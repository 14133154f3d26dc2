"""Reads every file of checkpoints and compares it with its recorded sum. Needs no TensorFlow."""

import hashlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from switch_tf.checkpoints import folders
from switch_tf.refusals import Refusal
from switch_tf.storage import places

_BLOCK = 2**22  # bytes


class Finding(NamedTuple):
    """The result of reading one checkpoint.

    Attributes:
        checkpoint: Path of its folder.
        damage: Sentence that names the first damaged file, or None.
        num_bytes: Bytes of all files.
        has_sums: Whether the description has sums of the files, as those of format 3 have not.
    """

    checkpoint: pathlib.Path
    damage: str | None
    num_bytes: int = 0
    has_sums: bool = True

    def __str__(self):
        if self.damage:
            return f"{self.checkpoint} is damaged: {self.damage}"
        if not self.has_sums:
            return f"{self.checkpoint} has files of the right sizes; its format has no sums to compare them with."
        return f"{self.checkpoint} is whole."


def checkpoints_in(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints of a run folder, oldest first, or the folder if it is a checkpoint.

    Raises:
        Refusal: it is neither.
    """
    folder = places.at(folder)
    if (folder / "checkpoint.json").exists() or folder.name in map(_name, folders.steps(folder.parent)):
        return [folder]
    found = folders.newest_first(folder / "checkpoints")[::-1]
    if not found:
        raise Refusal(f"{str(folder)!r} holds no checkpoint to verify: name a run folder, or one of its "
                      "checkpoints/step_... folders.")
    return found


def _name(step):
    return folders.path_of("", step).name


def num_bytes_of(checkpoint: pathlib.Path) -> int:
    """Returns the bytes of all files of a checkpoint, 0 if it has no readable description."""
    try:
        return _size_of(folders.describe(checkpoint))
    except Refusal:
        return 0


def _size_of(description):
    return sum(entry["size"] for entry in description["files"].values())


def verify(checkpoint: pathlib.Path, on_read: Callable[[int], object] = lambda num_bytes: None) -> Finding:
    """Reads all files of a checkpoint, up to the first one that is damaged.

    Args:
        checkpoint: Checkpoint folder.
        on_read: function called with the number of bytes of each block that was read.
    """
    try:
        description = folders.describe(checkpoint)
    except Refusal as error:
        return Finding(checkpoint, str(error))
    files = description["files"]
    for name, entry in files.items():
        try:
            found = _sha256(checkpoint / name, on_read)
        except places.BucketError:
            raise
        except OSError as error:
            return Finding(checkpoint, f"{name} cannot be read ({error.strerror or error}).")
        if entry["sha256"] not in (None, found):
            return Finding(checkpoint, f"{name} has the SHA-256 {found} and not {entry['sha256']}.")
    return Finding(checkpoint, None, _size_of(description), all(entry["sha256"] for entry in files.values()))


def _sha256(file, on_read):
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()
