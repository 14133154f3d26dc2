"""Finds the shipped gin files, in a wheel or an editable checkout."""

import functools
import pathlib
import re

from switch_tf.refusals import Refusal


@functools.cache
def folder() -> pathlib.Path:
    """Returns the folder that holds the shipped `gin/`: a wheel's package, or its parent in an editable install.

    `importlib.resources` needs an `__init__.py` there, and that would hide the gin library.
    """
    package = pathlib.Path(__file__).resolve().parents[1]
    for candidate in (package, package.parent):
        if (candidate / "gin" / "models").is_dir():
            return candidate
    raise Refusal(
        f"The gin files that belong to switch_tf are neither in {package} nor in {package.parent}. "
        "Install the package again.")


def preset_names() -> list[str]:
    """Returns the sorted names of the files in `gin/models`."""
    return sorted(file.stem for file in (folder() / "gin" / "models").glob("*.gin"))


def macros() -> set[str]:
    """Returns all macros of shipped files."""
    return {name for file in folder().glob("gin/*/*.gin")
            for name in re.findall(r"^([A-Z_]+) =", file.read_text(), re.MULTILINE)}
