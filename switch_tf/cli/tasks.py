"""`switch-tf tasks`, `vocabulary` and `cache`."""

import contextlib
import dataclasses
import functools
import os
from argparse import Namespace

from etils import epy

from switch_tf import sentencepiece_training
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
from switch_tf.configs import gin_syntax, names, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, outputs, places

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import data, experiments
    from switch_tf.checkpoints import vocabulary_choice
    from switch_tf.data import cache_writing, example_files, task_catalog
    from switch_tf.surgery import distillation

_NUM_EXAMPLES = 3
_TOP_K = 32
# The rows of an embedding are a multiple of it, to fill an accelerator's tiles and to be easy to split.
_ROWS = 128

TASKS_EXAMPLES = r"""
switch-tf tasks
switch-tf tasks docs_corpus_span_corruption
"""
TASKS_ARGUMENTS = (
    option("name", "a task or mixture to show three examples of", "NAME", nargs="?"),
    option("--split", "split of the examples (default: train, or the task's first)", "SPLIT"),
    option("--vocabulary", "instead of the task's own: a name, or the path of a SentencePiece model", "VOCABULARY"),
    *options.GIN,
)


def run_tasks(arguments: Namespace) -> tuple[dict, str]:
    """Returns the list of tasks, or a task's examples."""
    if not arguments.name:
        if arguments.split or arguments.vocabulary:
            raise Refusal("--split and --vocabulary are of the task to show: name it, switch-tf tasks NAME.")
        if arguments.gin_bindings and not arguments.gin_file:
            raise Refusal("--gin.NAME=VALUE changes what gin files say: name a task, or give a --gin_file.")
        listing = _list(arguments)
        return listing, task_catalog.describe_all(**listing)
    files, said = _apply_files(arguments)
    name = arguments.name or said.macro("MIXTURE_OR_TASK_NAME")
    lengths = said.macro("TASK_FEATURE_LENGTHS")
    if not lengths:
        raise Refusal(f"{' and '.join(files)} set no TASK_FEATURE_LENGTHS, the tokens of inputs and targets. Give the "
                      "task's own file, such as gin/tasks/docs_corpus.gin.")
    split = arguments.split or next(iter(data.describe(name)["splits"]), "train")
    description = data.DatasetDescription(name, lengths, 1, split, vocabulary=arguments.vocabulary)
    size = data.vocabulary_size(name, arguments.vocabulary)
    examples = data.examples(description, _NUM_EXAMPLES)
    result = {"name": name, "split": split, "lengths": dict(lengths), "vocabulary_size": size, "examples": examples}
    from switch_tf.data.pipeline import describe_examples  # not lazily: `data.examples` is a function

    return result, describe_examples(result)


def _list(arguments):
    """Returns `tasks`; `to_be_given`: shipped file -> macros that a user must set; `left_out`: file -> the reason."""
    own, shipped = _read_files(arguments.gin_file, arguments.gin_search_paths), _read_files()
    left_out = {}
    if own:
        _apply_files(arguments)
    else:
        quiet.import_tensorflow()
        with outputs.held_back():
            for file, (task, _) in shipped.items():
                try:
                    if task:
                        names.register_task(task)
                except Refusal as error:
                    left_out[file] = str(error)
    tasks = [data.describe(name) | {"gin_file": _file_of(name, own) or _file_of(name, shipped)}
             for name in data.names()]
    return {"tasks": tasks, "to_be_given": {file: required for file, (_, required) in shipped.items() if required},
            "left_out": left_out}


def _read_files(files=None, search_paths=""):
    """Returns gin file -> the name of its task, None if a function makes it, and the macros that a user must set.

    By default of the shipped files.
    """
    tasks = {}
    for file in shipped_gin.names("tasks") if files is None else files:
        said = gin_syntax.read([file], search_paths=search_paths).check_names()
        task = said.macros.get("MIXTURE_OR_TASK_NAME")
        tasks[file] = task if isinstance(task, str) else None, said.required()
    return tasks


def _file_of(name, files):
    """Returns the file of a task, else the first with a task registered together with it."""
    together = names.registers(name)
    tasks = {file: task for file, (task, _) in files.items() if task}
    having = ([file for file in tasks if tasks[file] == name]
              or [file for file in tasks if together and names.registers(tasks[file]) is together])
    return having[0] if having else None


def _apply_files(arguments):
    """Registers the task of the gin files, or of the shipped file for `name`. Returns the files and their content."""
    files, name = arguments.gin_file, arguments.name
    if not files:
        shipped = _read_files()
        file = _file_of(name, shipped) or f"gin/tasks/{name}.gin"
        if file not in shipped:
            raise Refusal(f"No shipped task or mixture is called {name!r}.{nearest(name, names.task_names())} "
                          "`switch-tf tasks` lists them; one of your own needs its --gin_file.")
        files, arguments.name = [file], name if _file_of(name, shipped) else None
    quiet.expect_tensorflow()
    said = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check(is_whole=False)
    quiet.import_tensorflow()
    said.bind_others()
    task = said.macro("MIXTURE_OR_TASK_NAME")
    if isinstance(task, str):
        names.register_task(task)
    return files, said


VOCABULARY_EXAMPLES = r"""
switch-tf vocabulary --input texts.txt --size 8000 --output mine.model
switch-tf vocabulary --input pairs.jsonl --field inputs targets --size 8000 --output mine.model
"""
VOCABULARY_ARGUMENTS = (
    option("--input", "files or globs: .txt (a text a line), .jsonl, .json, .tsv, .csv, each also as .gz",
           "FILE", nargs="+", required=True),
    count("--size", "pieces, without the 100 sentinels that every task adds", required=True),
    option("--output", "the SentencePiece model to be written", "FILE", required=True),
    option("--field", "keys or columns to read, numbers in tables without a header (default: text)",
           "NAME", nargs="+", default=["text"]),
)


def run_vocabulary(arguments: Namespace) -> tuple[dict, str]:
    """Trains a vocabulary. Returns its sizes and the `vocab_size` of a model."""
    sentencepiece_training.check_output(arguments.output)
    with lock.held(arguments.output):
        quiet.import_tensorflow()
        fields = [int(name) if name.isdigit() else name for name in arguments.field]
        sample, num_texts = example_files.sample_sentences(arguments.input, fields)
        sentencepiece_training.train_file(sample, arguments.size, arguments.output)
    num_ids = arguments.size + data.NUM_SENTINELS
    result = {
        "output": arguments.output, "num_texts": num_texts, "num_sentences": len(sample),
        "num_pieces": arguments.size, "num_ids": num_ids, "vocab_size": -(-num_ids // _ROWS) * _ROWS,
        "characters_per_token": sentencepiece_training.characters_per_token(arguments.output, sample),
    }
    return result, sentencepiece_training.describe(result)


CACHE_EXAMPLES = r"""
switch-tf cache docs_corpus_span_corruption
switch-tf cache t5_base c4 distill --teacher runs/switch --output /data/predictions
"""
_WITH_TEACHER = "--teacher; leave it out, or name the teacher's run."
CACHE_ARGUMENTS = (
    option("name", "a task or mixture (default: the one that the gin files name)", "TASK", nargs="?"),
    option("--output", "the run's CACHE_DIR (default: the gin files', else ~/.cache/switch_tf/tasks)", "FOLDER"),
    option("--vocabulary", "the run's VOCABULARY, if it has one (default: the task's own)", "VOCABULARY"),
    option("--split", "which splits (default: all)", "SPLIT", nargs="+"),
    count("--num_processes", "workers on this machine (default: one a core)"),
    count("--num_shards",
          "files of the train split (default: as many as its data, more of few or large ones)"),
    option("--overwrite", "begin anew, whatever is in the folder"),
    option("--teacher",
           "store the predictions of this run or checkpoint for the training rows that a student's gin files "
           "describe (TRAIN_STEPS batches of SEED), in --output", "RUN"),
    count("--top_k", f"with --teacher: most probable tokens to store for each target (default {_TOP_K})",
          goes_with=_WITH_TEACHER),
    *options.GIN,
    "Apache Beam's own flags stand behind --, such as: -- --runner=DataflowRunner "
    "--project=...",
    *options.device_options(goes_with=_WITH_TEACHER),
)


def run_cache(arguments: Namespace) -> dict:
    """Writes the incomplete shards. Returns the cache's sizes."""
    if arguments.teacher:
        return _store_predictions(arguments)
    if not arguments.name and not arguments.gin_file:
        raise Refusal("Name a TASK, or give the --gin_file of a run; `switch-tf tasks` lists what there is.")
    if arguments.gin_bindings and not arguments.gin_file:
        raise Refusal("--gin.NAME=VALUE changes what gin files say: give a --gin_file.")
    for flag in arguments.beam_flags:
        if not flag.startswith("--"):
            raise Refusal(f"{flag!r} is no flag of Apache Beam; behind -- each is one word, such as "
                          "--runner=DataflowRunner.")
    files, said = _apply_files(arguments)
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
          f"Use it:  --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR=\"'{root}'\"", sep="\n")
    return {"cache_dir": str(root), "caches": caches}


def _register_task(said):
    quiet.import_tensorflow()
    said.check_names()
    said.bind_others()
    said.macro("MIXTURE_OR_TASK_NAME")


def _store_predictions(arguments):
    if not arguments.gin_file:
        raise Refusal("--teacher needs the gin files of its student: a model, a task and gin/runs/distill.gin or "
                      "gin/runs/finetune_distill.gin, each with --gin_file.")
    for name in ("vocabulary", "split", "num_processes", "num_shards"):  # only for tokenisation
        if getattr(arguments, name) is not None:
            raise Refusal(f"--{name} does not go with --teacher, whose gin files describe the batches; leave it out.")
    if arguments.beam_flags:
        raise Refusal(f"--teacher runs without Apache Beam; leave out -- {' '.join(arguments.beam_flags)}.")
    if not arguments.output:
        raise Refusal("--teacher needs an --output, the folder for its predictions.")
    if len(cluster.members().addresses) > 1:
        raise Refusal("--teacher works in one process; unset TF_CONFIG, and use all devices of one machine.")
    top_k = arguments.top_k or _TOP_K
    bindings = ["MODEL_DIR='unused'"]
    if "TEACHER" in gin_syntax.read(arguments.gin_file, search_paths=arguments.gin_search_paths).macros:
        bindings.append(f"TEACHER={arguments.teacher!r}")  # INITIAL_CHECKPOINT may refer to it
    described = options.load(arguments, bindings, arguments.devices)
    described = experiments.place_here(described)
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
              f"{described.config.vocab_size} up. The others are scaled up.")
    print(f"{stored['rows']:,} rows ({stored['new_rows']:,} new), {stored['bytes'] / 2**20:.1f} MB: {folder}",
          f"Use them:  --gin.TEACHER_PREDICTIONS=\"'{folder}'\"", sep="\n")
    return {"teacher_predictions": str(folder), **stored}
