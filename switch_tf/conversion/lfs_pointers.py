"""Files that Git LFS left out of a clone: a pointer of three lines stands for each."""

import pathlib

from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

_START = b"version https://git-lfs.github.com/spec/"


def check_is_none(path: pathlib.Path) -> None:
    """Raises Refusal if a regular file is a pointer of Git LFS."""
    with reading(path), path.open("rb") as file:
        if file.read(len(_START)) == _START:
            raise Refusal(f"{path} is a pointer of Git LFS and not the file itself; get it with git lfs pull, or "
                          "download it.")
