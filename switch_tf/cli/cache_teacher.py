"""`switch-tf cache --teacher`: a teacher's predictions of a run's training rows, for TEACHER_PREDICTIONS."""

import argparse
import dataclasses

from etils import epy

from switch_tf import checks
from switch_tf.cli import gin_files
from switch_tf.configs import gin_syntax
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data, experiments
    from switch_tf.checkpoints import vocabulary_choice
    from switch_tf.surgery import distillation, predictions, teachers

_TOP_K = 32
_OF_TOKENS = {"name": "TASK", "vocabulary": "--vocabulary", "split": "--split", "num_processes": "--num_processes",
              "num_shards": "--num_shards"}  # arguments of tokenisation alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--teacher` and `--top_k`."""
    parser.add_argument("--teacher", metavar="RUN",
                        help="store the predictions of this run or checkpoint for the training rows that a student's "
                             "gin files describe (TRAIN_STEPS batches of SEED), in --output")
    parser.add_argument("--top_k", type=int, metavar="K",
                        help=f"with --teacher: most probable tokens to store for each target (default {_TOP_K})")


def check_unused(arguments: argparse.Namespace) -> None:
    """Refuses arguments that need --teacher.

    Raises:
        Refusal: one is given.
    """
    for name in ("top_k", "devices", "backend"):
        if getattr(arguments, name) is not None:
            raise Refusal(f"--{name} goes with --teacher; leave it out, or name the teacher's run.")


def run(arguments: argparse.Namespace) -> dict:
    """Stores the predictions that are not there yet; returns the sizes of the folder."""
    top_k = _check(arguments)
    described = gin_files.load(arguments, ["MODEL_DIR='unused'", *_teacher_macro(arguments)], arguments.devices)
    described = experiments.on_this_machine(described)
    objective = described.make_objective()
    if not isinstance(objective, distillation.Distillation):
        raise Refusal("These gin files have no distillation, and --teacher is for a student of it; give "
                      "--gin_file=gin/runs/distill.gin or gin/runs/finetune_distill.gin.")
    described = dataclasses.replace(described, run=dataclasses.replace(
        described.run, vocabulary=vocabulary_choice.choose(described.run)))
    teacher = teachers.LiveTeacher(arguments.teacher, objective.live_teacher.capacity_factor,
                                       objective.live_teacher.dtype, argument="--teacher")
    request = _request(described, teacher, objective.temperature, top_k)
    folder = places.at(arguments.output)
    with lock.held(folder):
        predictions.begin(folder, request, arguments.overwrite)
        stored = teachers.store(described, teacher, folder)
    if stored["unshared"]:
        print(f"The teacher gives {stored['unshared']:.2g} of its probability to ids that the student lacks, from "
              f"{described.config.vocab_size} up. The others are scaled up.", file=arguments.stream)
    print(f"{stored['rows']:,} rows ({stored['new_rows']:,} new), {stored['bytes'] / 2**20:.1f} MB: {folder}",
          f"Use them:  --gin.TEACHER_PREDICTIONS=\"'{folder}'\"", sep="\n", file=arguments.stream)
    return {"teacher_predictions": str(folder), **stored}


def _check(arguments):
    """Refuses wrong arguments before TensorFlow is imported; returns the number of tokens to store."""
    if not arguments.gin_file:
        raise Refusal("--teacher needs the gin files of its student: a model, a task and gin/runs/distill.gin or "
                      "gin/runs/finetune_distill.gin, each with --gin_file.")
    for name, shown in _OF_TOKENS.items():
        if getattr(arguments, name) is not None:
            raise Refusal(f"{shown} does not go with --teacher, whose gin files describe the batches; leave it out.")
    if arguments.beam_flags:
        raise Refusal(f"--teacher runs without Apache Beam; leave out -- {' '.join(arguments.beam_flags)}.")
    if arguments.output is None:
        raise Refusal("--teacher needs an --output, the folder for its predictions.")
    checks.text("--teacher", arguments.teacher)
    checks.text("--output", arguments.output)
    if len(cluster.members().addresses) > 1:
        raise Refusal("--teacher works in one process; unset TF_CONFIG, and use all devices of one machine.")
    return checks.integer("--top_k", _TOP_K if arguments.top_k is None else arguments.top_k, 1)


def _teacher_macro(arguments):
    """Returns the binding of TEACHER if the gin files have that macro, because INITIAL_CHECKPOINT may refer to it."""
    macros = gin_syntax.read(arguments.gin_file, search_paths=arguments.gin_search_paths).macros
    return [f"TEACHER={arguments.teacher!r}"] if "TEACHER" in macros else []


def _request(described, teacher, temperature, top_k):
    """Returns what the predictions depend on, after checking the data, the teacher and the number of tokens."""
    run, config = described.run, described.config
    data.check_task(run.mixture_or_task_name)
    data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
    vocabulary = data.vocabulary_fingerprint(run.mixture_or_task_name, run.vocabulary)
    teacher.check(config, {"vocabulary": vocabulary, "pieces": data.pieces_fingerprint(
        run.mixture_or_task_name, run.vocabulary)})
    if top_k > config.vocab_size:
        raise Refusal(f"--top_k must be at most the vocab_size of {config.vocab_size}, not {top_k}.")
    data.check_examples(data.description_of_data(run, config, "train", run.seed))
    return teachers.request_of(described, teacher, temperature, top_k, vocabulary)
