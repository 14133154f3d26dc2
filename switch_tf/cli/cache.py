"""`switch-tf cache`: tokenises a task once, for USE_CACHED_TASKS, or stores a teacher's predictions (`--teacher`)."""

import argparse
import contextlib
import dataclasses
import functools
import os

from etils import epy

from switch_tf import checks
from switch_tf.cli import gin_files, tasks
from switch_tf.configs import gin_syntax
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data, experiments
    from switch_tf.checkpoints import vocabulary_choice
    from switch_tf.data import cache_writing
    from switch_tf.surgery import distillation

_TOP_K = 32

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
    parser.add_argument("--num_processes", type=int, at_least=1, metavar="N",
                        help="workers on this machine (default: one a core)")
    parser.add_argument("--num_shards", type=int, at_least=1, metavar="N",
                        help="files of the train split (default: as many as its data, more of few or large ones)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever is in the folder")
    parser.add_argument("--teacher", metavar="RUN",
                        help="store the predictions of this run or checkpoint for the training rows that a student's "
                             "gin files describe (TRAIN_STEPS batches of SEED), in --output")
    parser.add_argument("--top_k", type=int, at_least=1, metavar="K",
                        help=f"with --teacher: most probable tokens to store for each target (default {_TOP_K})")
    parser.epilog = "Apache Beam's own flags stand behind --, such as: -- --runner=DataflowRunner --project=..."
    parser.set_defaults(beam_flags=[])
    gin_files.add_arguments(parser)
    gin_files.add_device_arguments(parser)


def run(arguments: argparse.Namespace) -> dict:
    """Writes the incomplete shards; returns the sizes of the cache."""
    if arguments.teacher is not None:
        return _store_predictions(arguments)
    _check(arguments)
    files, said = tasks.apply_files(arguments)
    name = arguments.name or said.macro("MIXTURE_OR_TASK_NAME")
    if not name:
        raise Refusal(f"{' and '.join(files)} set no MIXTURE_OR_TASK_NAME: name the TASK.")
    vocabulary = arguments.vocabulary or said.macro("VOCABULARY")
    output = arguments.output or said.macro("CACHE_DIR")

    with contextlib.ExitStack() as locks:
        splits = arguments.split or data.describe(name)["splits"]
        if not splits:
            raise Refusal(f"The data of {name!r} are not on this machine, so its splits are not known; docs/data.md "
                          "and docs/tasks.md say how to prepare them.")
        shards = [shard for split in splits for shard in data.plan_cache(
            name, split, vocabulary, output, arguments.num_shards, arguments.overwrite,
            lambda folder: locks.enter_context(lock.held(folder)))]
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
    for name in ("top_k", "devices", "backend"):
        if getattr(arguments, name) is not None:
            raise Refusal(f"--{name} goes with --teacher; leave it out, or name the teacher's run.")
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


def _store_predictions(arguments):
    """Stores the predictions of a teacher that are not there yet; returns the sizes of the folder."""
    _check_teacher(arguments)
    top_k = arguments.top_k or _TOP_K
    bindings = ["MODEL_DIR='unused'"]
    if "TEACHER" in gin_syntax.read(arguments.gin_file, search_paths=arguments.gin_search_paths).macros:
        bindings.append(f"TEACHER={arguments.teacher!r}")  # because INITIAL_CHECKPOINT may refer to it
    described = gin_files.load(arguments, bindings, arguments.devices)
    described = experiments.on_this_machine(described)
    objective = described.make_objective()
    if not isinstance(objective, distillation.Distillation):
        raise Refusal("These gin files have no distillation, and --teacher is for a student of it; give "
                      "--gin_file=gin/runs/distill.gin or gin/runs/finetune_distill.gin.")
    described = dataclasses.replace(described, run=dataclasses.replace(
        described.run, vocabulary=vocabulary_choice.choose(described.run)))
    teacher = distillation.LiveTeacher(arguments.teacher, objective.live_teacher.capacity_factor,
                                       objective.live_teacher.dtype, argument="--teacher")
    run, config = described.run, described.config
    data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
    vocabulary = data.vocabulary_fingerprint(run.mixture_or_task_name, run.vocabulary)
    teacher.check(config, {"vocabulary": vocabulary, "pieces": data.pieces_fingerprint(
        run.mixture_or_task_name, run.vocabulary)})
    if top_k > config.vocab_size:
        raise Refusal(f"--top_k must be at most the vocab_size of {config.vocab_size}, not {top_k}.")
    data.check_examples(data.description_of_data(run, config, "train", run.seed))
    folder = places.at(arguments.output)
    with lock.held(folder):
        stored = distillation.store(described, teacher, folder, objective.temperature, top_k, vocabulary,
                                    arguments.overwrite)
    if stored["unshared"]:
        print(f"The teacher gives {stored['unshared']:.2g} of its probability to ids that the student lacks, from "
              f"{described.config.vocab_size} up. The others are scaled up.", file=arguments.stream)
    print(f"{stored['rows']:,} rows ({stored['new_rows']:,} new), {stored['bytes'] / 2**20:.1f} MB: {folder}",
          f"Use them:  --gin.TEACHER_PREDICTIONS=\"'{folder}'\"", sep="\n", file=arguments.stream)
    return {"teacher_predictions": str(folder), **stored}


def _check_teacher(arguments):
    """Refuses wrong arguments before TensorFlow is imported."""
    if not arguments.gin_file:
        raise Refusal("--teacher needs the gin files of its student: a model, a task and gin/runs/distill.gin or "
                      "gin/runs/finetune_distill.gin, each with --gin_file.")
    for name in ("name", "vocabulary", "split", "num_processes", "num_shards"):  # of tokenisation alone
        if getattr(arguments, name) is not None:
            raise Refusal(f"{'TASK' if name == 'name' else f'--{name}'} does not go with --teacher, whose gin files "
                          "describe the batches; leave it out.")
    if arguments.beam_flags:
        raise Refusal(f"--teacher runs without Apache Beam; leave out -- {' '.join(arguments.beam_flags)}.")
    if arguments.output is None:
        raise Refusal("--teacher needs an --output, the folder for its predictions.")
    checks.text("--teacher", arguments.teacher)
    checks.text("--output", arguments.output)
    if len(cluster.members().addresses) > 1:
        raise Refusal("--teacher works in one process; unset TF_CONFIG, and use all devices of one machine.")
