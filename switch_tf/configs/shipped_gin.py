"""Finds the shipped gin files, in a wheel or an editable checkout."""

import functools
import pathlib
import re
from collections.abc import Iterable, Sequence

from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal

# T5X's names in upper case -> what takes their place.
_OF_T5X = {
    "MIXTURE_OR_TASK_MODULE": "the task's gin file imports the module, as gin/tasks/c4.gin does",
    "GIN_BINDINGS": "each binding is an argument, --gin.NAME=VALUE",
    "TFDS_DATA_DIR": "the environment variable TFDS_DATA_DIR names the folder",
    "PACK": "packing is --gin.Run.pack=True",
    "DATASETCONFIG": "the data are described by TASK_FEATURE_LENGTHS, BATCH_SIZE and Run, as in --gin.Run.pack=True",
}


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


def names(*rooms: str) -> list[str]:
    """Returns the sorted names of all shipped files, such as gin/models/t5_tiny.gin, or of those in some rooms."""
    return sorted(str(path.relative_to(folder())) for path in folder().glob("gin/*/*.gin")
                  if not rooms or path.parent.name in rooms)


def find(name: str, rooms: Sequence[str]) -> str:
    """Returns the shipped file of `rooms` that a name such as t5_tiny or models/t5_tiny means."""
    files = names(*rooms)
    matches = [file for file in files if f"/{file}".endswith(f"/{name}.gin")]
    if len(matches) != 1:
        meaning = " and ".join(matches) or f"no shipped gin file of {', '.join(rooms)}"
        raise Refusal(f"{name!r} names {meaning}.{nearest(name, map(stem, files))} Files of your own are named whole, "
                      "as mine.gin.")
    return matches[0]


def stem(file: str) -> str:
    """Returns "t5_tiny" for "gin/models/t5_tiny.gin"."""
    return pathlib.PurePath(file).stem


def preset_names() -> list[str]:
    """Returns the sorted names of the files in `gin/models`."""
    return [stem(file) for file in names("models")]


def hint(name: str, choices: Iterable[str]) -> str:
    """Returns a sentence on an unknown name: what takes the place of T5X's, or the nearest of `choices`."""
    place = _OF_T5X.get(name.rpartition(".")[2].lstrip("-").upper())
    return f" This name is T5X's; here {place}." if place else nearest(name, choices)


def macros() -> set[str]:
    """Returns all macros of shipped files."""
    return {name for file in folder().glob("gin/*/*.gin")
            for name in re.findall(r"^([A-Z_]+) =", file.read_text(), re.MULTILINE)}
