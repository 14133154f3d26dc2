"""A checkpoint of weights that is written part by part, so that a kill costs one part and memory holds one."""

import pathlib
import shutil
from collections.abc import Sequence

from switch_tf.checkpoints import bundles, descriptions
from switch_tf.checkpoints.descriptions import Sum
from switch_tf.partitioning.variables import Piece


class Parts:
    """The values of a checkpoint.

    The values of part i of n are `folder/state.data-i-of-n` as soon as it is written. Its index stays aside until all
    are joined, which renames the files of values away and back.

    Args:
        folder: Path of the checkpoint folder.
        aside: Path of a folder on the same file system, for files that the checkpoint does not need.
        count: Number of parts.
    """

    def __init__(self, folder: pathlib.Path, aside: pathlib.Path, count: int):
        self._prefix, self._aside, self._joining, self._count = folder / "state", aside, aside / "joining", count
        for index in range(count):
            moved = bundles.data_file(self._in(self._joining, index))
            if moved.exists():  # a kill interrupted the joining
                moved.rename(self._values(index))
        names = {self._values(index).name for index in range(count)}
        for file in folder.iterdir():  # an index, and what else was written after the last part
            if file.name not in names:
                file.unlink()

    def write(self, index: int, pieces: Sequence[Piece], graph: bytes | None = None) -> Sum:
        """Writes a part, with the `bundles.object_graph` in one of them. Returns the sum of its values."""
        prefix = self._in(self._aside, index)
        bundles.write(prefix, pieces, graph)
        descriptions.sum_of(_index(prefix))  # waits until it is on disk
        entry = descriptions.sum_of(bundles.data_file(prefix))
        bundles.data_file(prefix).rename(self._values(index))
        descriptions.sync(self._aside)
        descriptions.sync(self._prefix.parent)
        return entry

    def join(self) -> None:
        """Writes the common index of all parts."""
        shutil.rmtree(self._joining, ignore_errors=True)
        self._joining.mkdir()
        for index in range(self._count):
            shutil.copyfile(_index(self._in(self._aside, index)), _index(self._in(self._joining, index)))
            self._values(index).rename(bundles.data_file(self._in(self._joining, index)))
        bundles.join([self._in(self._joining, index) for index in range(self._count)], self._prefix)

    def sums(self, entries: Sequence[Sum]) -> dict[str, Sum]:
        """Returns name of each file of values -> its sum, given what `write` returned of each part."""
        return {self._values(index).name: entry for index, entry in enumerate(entries)}

    def _values(self, index):
        return bundles.data_file(self._prefix, index, self._count)

    def _in(self, folder, index):
        return folder / f"part_{index:05d}"


def _index(prefix):
    return prefix.with_name(f"{prefix.name}.index")
