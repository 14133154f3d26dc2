"""`switch-tf tasks`: lists tasks and mixtures, or shows examples of one. Nothing is downloaded."""

import argparse
from collections.abc import Sequence

from etils import epy

from switch_tf.cli import options
from switch_tf.configs import gin_syntax, names, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal
from switch_tf.storage import outputs

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data
    from switch_tf.data import task_catalog

NUM_EXAMPLES = 3

EXAMPLES = r"""
switch-tf tasks
switch-tf tasks docs_corpus_span_corruption
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the task to show, its split, and gin files of the user's own tasks."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a task or mixture to show three examples of")
    parser.add_argument("--split", help="split of the examples (default: train, or the task's first)")
    parser.add_argument("--vocabulary", help="instead of the task's own: a name, or the path of a SentencePiece model")
    options.add_gin_arguments(parser)


def run(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Returns the list or the examples."""
    if not arguments.name:
        if arguments.split or arguments.vocabulary:
            raise Refusal("--split and --vocabulary are of the task to show: name it, switch-tf tasks NAME.")
        if arguments.gin_bindings and not arguments.gin_file:
            raise Refusal("--gin.NAME=VALUE changes what gin files say: name a task, or give a --gin_file.")
        listing = _list(arguments)
        return listing, task_catalog.describe_all(**listing)
    result = _show(arguments)
    from switch_tf.data.inspection import describe  # not lazily: `examples` of the package is the function

    return result, describe(result)


def _list(arguments):
    """Returns `tasks`; `to_be_given`: shipped file -> macros that a user has to set; `left_out`: file -> the reason."""
    own, shipped = read_files(arguments.gin_file, arguments.gin_search_paths), shipped_files()
    left_out = {}
    if own:
        apply_files(arguments)
    else:
        quiet.import_tensorflow()
        with outputs.held_back():
            for file, (task, _) in shipped.items():
                try:
                    if task:
                        names.register_task(task)
                except Refusal as error:  # t5 is not installed
                    left_out[file] = str(error)
    tasks = [data.describe(name) | {"gin_file": file_of(name, own) or file_of(name, shipped)}
             for name in data.names()]
    return {"tasks": tasks, "to_be_given": {file: required for file, (_, required) in shipped.items() if required},
            "left_out": left_out}


def _show(arguments):
    name, (files, said) = arguments.name, apply_files(arguments)
    lengths = said.macro("TASK_FEATURE_LENGTHS")
    if lengths is None:
        raise Refusal(f"{' and '.join(files)} set no TASK_FEATURE_LENGTHS, the tokens of inputs and targets. Give the "
                      "task's own file, such as gin/tasks/docs_corpus.gin.")
    split = arguments.split or next(iter(data.describe(name)["splits"]), "train")
    description = data.DatasetDescription(name, lengths, 1, split, vocabulary=arguments.vocabulary)
    size = data.vocabulary_size(name, arguments.vocabulary)
    examples = data.examples(description, NUM_EXAMPLES)
    return {"name": name, "split": split, "lengths": dict(lengths), "vocabulary_size": size, "examples": examples}


def read_files(files: Sequence[str], search_paths: str = "") -> dict[str, tuple[str | None, list[str]]]:
    """Returns gin file -> the name of its task, None if a function makes it, and the macros that a user has to set."""
    found = {}
    for file in files:
        said = gin_syntax.read([file], search_paths=search_paths)
        said.import_modules()
        task = said.macros.get("MIXTURE_OR_TASK_NAME")
        found[file] = task if isinstance(task, str) else None, said.required()
    return found


def shipped_files() -> dict[str, tuple[str | None, list[str]]]:
    """Returns the shipped task files, by the names that users know them under."""
    folder = shipped_gin.folder()
    return read_files(sorted(str(path.relative_to(folder)) for path in folder.glob("gin/tasks/*.gin")))


def file_of(name: str, files: dict[str, tuple[str | None, list[str]]]) -> str | None:
    """Returns the file that names a task, else the first whose task is registered together with it."""
    together = names.registers(name)
    tasks = {file: task for file, (task, _) in files.items() if task}
    having = ([file for file in tasks if tasks[file] == name]
              or [file for file in tasks if together and names.registers(tasks[file]) is together])
    return having[0] if having else None


def apply_files(arguments: argparse.Namespace) -> tuple[list[str], gin_syntax.Gin]:
    """Returns the gin files that a user gave, or the shipped file of the task `name`, and what they say.

    Imports TensorFlow, and makes the task that they name.
    """
    files, name = arguments.gin_file, arguments.name
    if not files:
        file = file_of(name, shipped_files())
        if file is None:
            raise Refusal(f"No shipped task or mixture is called {name!r}.{nearest(name, names.task_names())} "
                          "`switch-tf tasks` lists them; one of your own needs its --gin_file.")
        files = [file]
    quiet.expect_tensorflow()
    said = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check_names().check_values()
    quiet.import_tensorflow()
    said.bind_others()
    task = said.macro("MIXTURE_OR_TASK_NAME")
    if isinstance(task, str):
        names.register_task(task)
    return files, said
