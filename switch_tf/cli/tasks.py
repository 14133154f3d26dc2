"""`switch-tf tasks`: all tasks and mixtures, or a few examples of one as text and as ids. Nothing is downloaded."""

import sys

from switch_tf.cli import gin_files, gin_macros, task_files
from switch_tf.configs import names
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

NUM_EXAMPLES = 3

EXAMPLES = r"""
switch-tf tasks
switch-tf tasks docs_corpus_span_corruption
"""


def add_arguments(parser) -> None:
    """Declares the task to show, its split, and gin files of the user's own tasks."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a task or mixture to show three examples of")
    parser.add_argument("--split", help="of which split (default: train, or the first that there is)")
    parser.add_argument("--vocabulary", help="instead of the task's own: a name, or the path of a SentencePiece model")
    gin_files.add_arguments(parser)


def run(arguments) -> dict:
    """Prints the list or the examples; the same as a JSON object."""
    stream = sys.stderr if arguments.json else sys.stdout
    if not arguments.name:
        if arguments.split or arguments.vocabulary:
            raise Refusal("--split and --vocabulary are of the task to show: name it, switch-tf tasks NAME.")
        if arguments.gin_bindings and not arguments.gin_file:
            raise Refusal("--gin.NAME=VALUE changes what gin files say: name a task, or give a --gin_file.")
        found = _list(arguments)
        left_out = found["left_out"]
        _print_list(found["tasks"], stream)
        if left_out:
            print(f"Not listed: the tasks of {', '.join(left_out)}. {next(iter(left_out.values()))}", file=stream)
        for file, macros in found["to_be_given"].items():
            print(f"{file}: a task of your own files, made from {', '.join(macros)}", file=stream)
        return found
    found = _show(arguments)
    _print_examples(found, stream)
    return found


def _list(arguments):
    """Returns `tasks`; `to_be_given`: shipped file -> macros that a user has to set; `left_out`: file -> the reason."""
    own, shipped = task_files.read(arguments.gin_file, arguments.gin_search_paths), task_files.shipped()
    left_out = {}
    if own:
        task_files.apply(arguments.gin_file, arguments)
    else:
        quiet.import_tensorflow()
        with quiet.held_back():
            for file in filter(lambda file: file.task, shipped):
                try:
                    names.register_task(file.task)
                except Refusal as error:  # t5 is not installed
                    left_out[file.file] = str(error)
    from switch_tf import data

    tasks = [data.describe(name) | {"gin_file": task_files.file_of(name, own) or task_files.file_of(name, shipped)}
             for name in data.names()]
    return {"tasks": tasks, "to_be_given": {file.file: file.required for file in shipped if file.required},
            "left_out": left_out}


def _show(arguments):
    name, files = arguments.name, task_files.files_of(arguments.name, arguments.gin_file)
    task_files.apply(files, arguments)
    lengths = gin_macros.made("TASK_FEATURE_LENGTHS")
    if lengths is None:
        raise Refusal(f"{' and '.join(files)} set no TASK_FEATURE_LENGTHS, the tokens of inputs and targets. Give the "
                      "task's own file, such as gin/tasks/docs_corpus.gin.")
    from switch_tf import data

    try:
        splits = data.describe(name)["splits"]
        split = arguments.split or next(iter(splits), "train")
        description = data.DatasetDescription(name, lengths, 1, split, vocabulary=arguments.vocabulary)
        size = data.vocabulary_size(name, arguments.vocabulary)
        examples = data.examples(description, NUM_EXAMPLES)
    except ValueError as error:
        raise Refusal(first_line(error)) from error
    return {"name": name, "split": split, "lengths": dict(lengths), "vocabulary_size": size, "examples": examples}


def _print_list(tasks, stream):
    files = sorted({task["gin_file"] or "" for task in tasks})
    for file in files:
        members = [task for task in tasks if (task["gin_file"] or "") == file]
        vocabularies = sorted({vocabulary for task in members for vocabulary in task["vocabularies"]})
        print(f"{file or 'in no gin file'} ({', '.join(vocabularies)})", file=stream)
        for task in members:
            if any(task["name"].startswith(f"{other['name']}.") for other in members):
                continue  # one of a hundred languages, which its mixture counts
            is_mixture = task["kind"] == "mixture"
            kind, metrics = (f"mixture of {len(task['tasks'])}", "") if is_mixture else ("", " ".join(task["metrics"]))
            print(f"  {task['name']:<34}{kind:<16}{' '.join(task['splits']):<24} {_here(task):<15} {metrics}".rstrip(),
                  file=stream)


def _here(task):
    """Whether all data sets, or how many of a mixture's, are on this machine."""
    missing, all_ = len(task["missing"]), len(task["data_sets"])
    if not missing:
        return "here"
    return f"{all_ - missing} of {all_} here" if all_ > 1 else "not here"


def _print_examples(found, stream):
    print(f"{found['name']}, split {found['split']}, at most {found['lengths']} tokens of {found['vocabulary_size']}",
          file=stream)
    for number, example in enumerate(found["examples"], 1):
        for feature, shown in example.items():
            print(f"{number}. {feature}: {shown['text']}\n   {' '.join(map(str, shown['ids']))}", file=stream)
