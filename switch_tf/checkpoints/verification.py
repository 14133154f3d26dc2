"""Reads files of checkpoints and compares them with their recorded sums. Needs no TensorFlow."""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

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
        if damage := _damage(checkpoint / name, entry, on_read):
            return Finding(checkpoint, damage)
    return Finding(checkpoint, None, _size_of(description), all(entry["sha256"] for entry in files.values()))


def check_positions(checkpoint: pathlib.Path, description: dict[str, Any]) -> None:
    """Compares the files that no checksum of TensorFlow covers, such as the position in the data, with their sums.

    TensorFlow compares each tensor that it reads with a checksum in the index, which is one of these files.

    Args:
        checkpoint: Checkpoint folder.
        description: From `folders.describe`.

    Raises:
        BrokenCheckpoint: a file is damaged, or is one of another checkpoint.
        BucketError: the bucket does not answer.
    """
    for name, entry in description["files"].items():
        is_checked = name.startswith("state.data") or entry["sha256"] is None
        if not is_checked and (damage := _damage(checkpoint / name, entry)):
            raise folders.BrokenCheckpoint(f"{checkpoint} is damaged: {damage}")


def _damage(file, entry, on_read=lambda num_bytes: None):
    """Returns a sentence about a file that differs from its recorded sum, or None."""
    try:
        found = _sha256(file, on_read)
    except places.BucketError:
        raise
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror or error})."
    if entry["sha256"] in (None, found):
        return None
    return f"{file.name} has the SHA-256 {found} and not {entry['sha256']}."


def _sha256(file, on_read):
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()
