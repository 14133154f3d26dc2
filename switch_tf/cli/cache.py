"""`switch-tf cache`: tokenises a task once, for USE_CACHED_TASKS, or stores a teacher's predictions (`--teacher`)."""

import argparse
import contextlib
import functools
import os

from etils import epy

from switch_tf import checks
from switch_tf.cli import cache_teacher, gin_files, task_files
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data
    from switch_tf.data import cache_writing

EXAMPLES = r"""
switch-tf cache docs_corpus_span_corruption
switch-tf cache --teacher runs/switch --gin_file=gin/models/t5_base.gin --gin_file=gin/tasks/c4.gin \
    --gin_file=gin/runs/distill.gin --output /data/predictions
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the task, the output and the workers."""
    parser.add_argument("name", nargs="?", metavar="TASK",
                        help="a task or mixture (default: the one that the gin files name)")
    parser.add_argument("--output", metavar="FOLDER",
                        help="the run's CACHE_DIR (default: the gin files', else ~/.cache/switch_tf/tasks)")
    parser.add_argument("--vocabulary", help="the run's VOCABULARY, if it has one (default: the task's own)")
    parser.add_argument("--split", nargs="+", metavar="SPLIT", help="which splits (default: all)")
    parser.add_argument("--num_processes", type=int, metavar="N",
                        help="workers on this machine (default: one a core)")
    parser.add_argument("--num_shards", type=int, metavar="N",
                        help="files of the train split (default: as many as its data, more of few or large ones)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever is in the folder")
    cache_teacher.add_arguments(parser)
    parser.epilog = "Apache Beam's own flags stand behind --, such as: -- --runner=DataflowRunner --project=..."
    parser.set_defaults(beam_flags=[])
    gin_files.add_arguments(parser)
    gin_files.add_device_arguments(parser)


def run(arguments: argparse.Namespace) -> dict:
    """Writes the incomplete shards; returns the sizes of the cache."""
    if arguments.teacher is not None:
        return cache_teacher.run(arguments)
    _check(arguments)
    files = task_files.files_of(arguments.name, arguments.gin_file)
    said = task_files.apply(files, arguments)
    name = arguments.name or said.macro("MIXTURE_OR_TASK_NAME")
    if not name:
        raise Refusal(f"{' and '.join(files)} set no MIXTURE_OR_TASK_NAME: name the TASK.")
    vocabulary = arguments.vocabulary or said.macro("VOCABULARY")
    output = arguments.output or said.macro("CACHE_DIR")

    with contextlib.ExitStack() as locks:
        shards = _plan(arguments, name, vocabulary, output, locks)
        incomplete = cache_writing.incomplete(shards)
        if incomplete:
            cache_writing.run(incomplete, len(shards), functools.partial(_register_task, said),
                               arguments.beam_flags, arguments.num_processes or os.cpu_count())
        caches = cache_writing.finish_cache(shards)
    root = places.at(caches[0]["folder"]).parent.parent
    print(*map(cache_writing.line_of, caches),
          f"Use it:  --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR=\"'{root}'\"", sep="\n", file=arguments.stream)
    return {"cache_dir": str(root), "caches": caches}


def _check(arguments):
    """Refuses wrong arguments before TensorFlow is imported."""
    if not arguments.name and not arguments.gin_file:
        raise Refusal("Name a TASK, or give the --gin_file of a run; `switch-tf tasks` lists what there is.")
    if arguments.gin_bindings and not arguments.gin_file:
        raise Refusal("--gin.NAME=VALUE changes what gin files say: give a --gin_file.")
    cache_teacher.check_unused(arguments)
    checks.optional("--num_processes", arguments.num_processes, checks.integer, 1)
    checks.optional("--num_shards", arguments.num_shards, checks.integer, 1)
    for flag in arguments.beam_flags:
        if not flag.startswith("--"):
            raise Refusal(f"{flag!r} is no flag of Apache Beam; behind -- each is one word, such as "
                          "--runner=DataflowRunner.")


def _register_task(said):
    """Declares in a worker the task that gin files name."""
    quiet.import_tensorflow()
    said.import_modules()
    said.bind_others()
    said.macro("MIXTURE_OR_TASK_NAME")


def _plan(arguments, name, vocabulary, output, locks):
    """Returns the shards of the requested splits; locks their folders."""
    splits = arguments.split or data.describe(name)["splits"]
    if not splits:
        raise Refusal(f"The data of {name!r} are not on this machine, so its splits are not known; docs/data.md "
                      "and docs/tasks.md say how to prepare them.")

    return [shard for split in splits for shard in data.plan_cache(
        name, split, vocabulary, output, arguments.num_shards, arguments.overwrite,
        lambda folder: locks.enter_context(lock.held(folder)))]
