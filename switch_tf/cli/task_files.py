"""Which gin file a task comes from, and what the files say once gin has read them: for `tasks` and `cache`."""

import copy
from typing import NamedTuple

import gin

from switch_tf.cli import gin_files, sources
from switch_tf.cli.gin_statements import Reference
from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

TASKS = "switch_tf.tasks"


class TaskFile(NamedTuple):
    """A gin file, the task that it names, the modules that come with it, the texts of those it imports, and of all."""

    file: str
    task: str | None
    modules: set[str]
    own_texts: set[str]
    texts: set[str]


def read(files, search_paths=""):
    """What gin files say of tasks, as far as that is seen without importing anything."""
    found = []
    for file in files:
        statements = gin_files.collect([file], (), search_paths)
        modules = sources.with_imported(statements.modules, TASKS)
        own_texts, texts = (set().union(*map(sources.texts, ones)) for ones in (statements.modules, modules))
        found.append(TaskFile(file, statements.macros.get("MIXTURE_OR_TASK_NAME"), modules, own_texts, texts))
    return found


def shipped():
    """The shipped task files, by the names that users know them under."""
    folder = shipped_gin.folder()
    return read(sorted(str(path.relative_to(folder)) for path in folder.glob("gin/tasks/*.gin")))


def file_of(name, files):
    """The file that names a task, else the one that imports its module and least besides; None if none does."""
    having = ([file for file in files if file.task == name]
              or [file for file in files if sources.is_among(name, file.own_texts)]
              or [file for file in files if sources.is_among(name, file.texts)])
    return min(having, key=lambda file: len(file.modules)).file if having else None


def files_of(name, given) -> list[str]:
    """The gin files that a user gave, or the shipped one of a task.

    Raises:
        Refusal: none was given, and none that is shipped has the task.
    """
    if given:
        return given
    files = shipped()
    if file := file_of(name, files):
        return [file]
    known = set().union(*(sources.task_names(module) for file in files for module in file.modules))
    raise Refusal(f"No shipped task or mixture is called {name!r}.{nearest(name, known)} `switch-tf tasks` lists them; "
                  "one of your own needs its --gin_file.")


def apply(files, arguments):
    """Has gin import the modules of files, and bind what they and the command line bind; returns what they say."""
    statements = gin_files.collect(files, arguments.gin_bindings, arguments.gin_search_paths)
    gin_files.check_required(statements)
    quiet.import_tensorflow()
    gin_files.apply(files, arguments.gin_bindings)
    if isinstance(statements.macros.get("MIXTURE_OR_TASK_NAME"), Reference):  # a task that is made when it is asked for
        try:
            copy.deepcopy(gin.query_parameter("MIXTURE_OR_TASK_NAME/macro.value"))
        except (ValueError, TypeError) as error:
            raise Refusal(first_line(error)) from error
    return statements
