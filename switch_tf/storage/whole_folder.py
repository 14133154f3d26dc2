"""Folders that appear complete or not at all."""

import contextlib
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from switch_tf.storage.whole_file import writing


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a hidden folder beside `folder`, which takes its name at the end. An error leaves nothing behind.

    Args:
        folder: resolved path of a folder that does not exist yet, or is empty.

    Raises:
        Refusal: an OSError kept the folder from being written.
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with writing(folder):
            unfinished.mkdir(parents=True)
            yield unfinished
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
