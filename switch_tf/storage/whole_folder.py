"""Folders that appear complete or not at all."""

import contextlib
import pathlib
import secrets
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A hidden folder beside `folder` to write into, which takes its name in the end; after an error nothing is left.

    Args:
        folder: resolved path that is not there yet, or an empty folder.
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
