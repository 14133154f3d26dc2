"""Shipped and own gin files of tasks, for `tasks` and `cache`."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from switch_tf.configs import gin_syntax, names, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal


class TaskFile(NamedTuple):
    """A gin file, the name of its task or None if a function makes it, and the macros that a user has to set."""

    file: str
    task: str | None
    required: list[str]


def read(files: Sequence[str], search_paths: str = "") -> list[TaskFile]:
    """Returns the TaskFile of each gin file."""
    found = []
    for file in files:
        said = gin_syntax.read([file], search_paths=search_paths)
        said.import_modules()
        task = said.macros.get("MIXTURE_OR_TASK_NAME")
        found.append(TaskFile(file, task if isinstance(task, str) else None, said.required()))
    return found


def shipped() -> list[TaskFile]:
    """Returns the shipped task files, by the names that users know them under."""
    folder = shipped_gin.folder()
    return read(sorted(str(path.relative_to(folder)) for path in folder.glob("gin/tasks/*.gin")))


def file_of(name: str, files: list[TaskFile]) -> str | None:
    """Returns the file that names a task, else the first whose task is registered together with it."""
    together = names.registers(name)
    having = ([file for file in files if file.task == name]
              or [file for file in files if together and file.task and names.registers(file.task) is together])
    return having[0].file if having else None


def files_of(name: str | None, given: list[str]) -> list[str]:
    """Returns the gin files that a user gave, or the shipped file of a task.

    Raises:
        Refusal: No file was given, and no shipped file has the task.
    """
    if given:
        return given
    if file := file_of(name, shipped()):
        return [file]
    raise Refusal(f"No shipped task or mixture is called {name!r}.{nearest(name, names.task_names())} "
                  "`switch-tf tasks` lists them; one of your own needs its --gin_file.")


def apply(files: Sequence[str], arguments: argparse.Namespace) -> gin_syntax.Gin:
    """Reads gin files and the command line's bindings, imports TensorFlow, and makes the task that they name.

    Raises:
        Refusal: What gin refuses, a macro that a user has to set, or a task that cannot be made.
    """
    quiet.expect_tensorflow()
    said = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check_names().check_values()
    quiet.import_tensorflow()
    said.bind_others()
    task = said.macro("MIXTURE_OR_TASK_NAME")
    if isinstance(task, str):
        names.register_task(task)
    return said
