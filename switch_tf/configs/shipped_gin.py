"""Finds the gin files that ship with the package, in a wheel or an editable checkout."""

import functools
import pathlib
import re

from switch_tf.refusals import Refusal


@functools.cache
def folder() -> pathlib.Path:
    """Returns the folder that holds the shipped `gin/`.

    A wheel has it inside the package, an editable install next to it. `importlib.resources` does not find the latter,
    because an `__init__.py` there would hide the gin library.
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
    """Returns the names of all macros in shipped files."""
    return {name for file in folder().glob("gin/*/*.gin")
            for name in re.findall(r"^([A-Z_]+) =", file.read_text(), re.MULTILINE)}
