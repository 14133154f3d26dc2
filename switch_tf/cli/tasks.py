"""`switch-tf tasks`: lists tasks and mixtures, or shows examples of one. Nothing is downloaded."""

import argparse

from etils import epy

from switch_tf.cli import gin_files, task_files
from switch_tf.configs import names
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
    gin_files.add_arguments(parser)


def run(arguments: argparse.Namespace) -> dict:
    """Prints and returns the list or the examples."""
    if not arguments.name:
        if arguments.split or arguments.vocabulary:
            raise Refusal("--split and --vocabulary are of the task to show: name it, switch-tf tasks NAME.")
        if arguments.gin_bindings and not arguments.gin_file:
            raise Refusal("--gin.NAME=VALUE changes what gin files say: name a task, or give a --gin_file.")
        listing = _list(arguments)
        print(task_catalog.describe_all(**listing), file=arguments.stream)
        return listing
    result = _show(arguments)
    from switch_tf.data.inspection import describe  # not lazily: `examples` of the package is the function

    print(describe(result), file=arguments.stream)
    return result


def _list(arguments):
    """Returns `tasks`; `to_be_given`: shipped file -> macros that a user has to set; `left_out`: file -> the reason."""
    own, shipped = task_files.read(arguments.gin_file, arguments.gin_search_paths), task_files.shipped()
    left_out = {}
    if own:
        task_files.apply(arguments.gin_file, arguments)
    else:
        quiet.import_tensorflow()
        with outputs.held_back():
            for file in filter(lambda file: file.task, shipped):
                try:
                    names.register_task(file.task)
                except Refusal as error:  # t5 is not installed
                    left_out[file.file] = str(error)
    tasks = [data.describe(name) | {"gin_file": task_files.file_of(name, own) or task_files.file_of(name, shipped)}
             for name in data.names()]
    return {"tasks": tasks, "to_be_given": {file.file: file.required for file in shipped if file.required},
            "left_out": left_out}


def _show(arguments):
    name, files = arguments.name, task_files.files_of(arguments.name, arguments.gin_file)
    lengths = task_files.apply(files, arguments).macro("TASK_FEATURE_LENGTHS")
    if lengths is None:
        raise Refusal(f"{' and '.join(files)} set no TASK_FEATURE_LENGTHS, the tokens of inputs and targets. Give the "
                      "task's own file, such as gin/tasks/docs_corpus.gin.")
    split = arguments.split or next(iter(data.describe(name)["splits"]), "train")
    description = data.DatasetDescription(name, lengths, 1, split, vocabulary=arguments.vocabulary)
    size = data.vocabulary_size(name, arguments.vocabulary)
    examples = data.examples(description, NUM_EXAMPLES)
    return {"name": name, "split": split, "lengths": dict(lengths), "vocabulary_size": size, "examples": examples}
