"""`switch-tf cache`: tokenises a task once, in several processes or on a cluster, for USE_CACHED_TASKS.

An Apache Beam pipeline of one step: each shard is written by one worker, whole, wherever Beam puts it. What a worker
needs to know the task is the run's gin configuration as text.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import os
import pathlib
import sys
import threading
import time

import gin

from switch_tf import checks
from switch_tf.cli import gin_files, task_files
from switch_tf.cli.gin_statements import Unknown
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal
from switch_tf.storage import output_lock

_LOOK_PERIOD = 0.5  # seconds

EXAMPLES = r"""
switch-tf cache docs_corpus_span_corruption
switch-tf cache --gin_file=gin/tasks/c4.gin --output /data/cache --split train
"""


def add_arguments(parser) -> None:
    """Declares what is cached, where, and how."""
    parser.add_argument("name", nargs="?", metavar="TASK",
                        help="a task or mixture (default: the one that the gin files name)")
    parser.add_argument("--output", metavar="FOLDER",
                        help="the run's CACHE_DIR (default: the gin files', else ~/.cache/switch_tf/tasks)")
    parser.add_argument("--vocabulary", help="the run's VOCABULARY, if it has one (default: the task's own)")
    parser.add_argument("--split", nargs="+", metavar="SPLIT", help="which splits (default: all)")
    parser.add_argument("--num_processes", type=int, default=os.cpu_count(), metavar="N",
                        help="workers on this machine (default: one a core)")
    parser.add_argument("--num_shards", type=int, metavar="N",
                        help="files of the train split (default: as many as its data, more of few or large ones)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever is in the folder")
    parser.epilog = "Apache Beam's own flags stand behind --, such as: -- --runner=DataflowRunner --project=..."
    parser.set_defaults(beam_flags=[])
    gin_files.add_arguments(parser)


def run(arguments) -> dict:
    """Writes what is missing of the cache; what is in it now is the JSON object."""
    _check(arguments)
    files = task_files.files_of(arguments.name, arguments.gin_file)
    statements = task_files.apply(files, arguments)
    name = arguments.name or _value_of("MIXTURE_OR_TASK_NAME", files)
    vocabulary = arguments.vocabulary or _plain_value_of("VOCABULARY", statements)
    output = arguments.output or _plain_value_of("CACHE_DIR", statements)
    with contextlib.ExitStack() as locks:
        shards = _plan(arguments, name, vocabulary, output, lambda folder: locks.enter_context(
            output_lock.held(folder)))
        missing = _missing(shards)
        if missing:
            _write(missing, len(shards), arguments)
        return _finish(shards, sys.stderr if arguments.json else sys.stdout)


def _plan(arguments, name, vocabulary, output, lock):
    """The shards of the splits that are wanted; `lock` is called with each folder before it is changed."""
    from switch_tf import data

    try:
        splits = arguments.split or data.describe(name)["splits"]
        if not splits:
            raise ValueError(f"The data of {name!r} are not on this machine, so its splits are not known; docs/data.md "
                             "and docs/tasks.md say how to prepare them.")
        return [shard for split in splits
                for shard in data.plan_cache(name, split, vocabulary, output, arguments.num_shards,
                                             arguments.overwrite, lock)]
    except OSError as error:
        told = f"The cache cannot be written to {error.filename!r} ({error.strerror}); choose another --output."
        raise Refusal(told if error.errno else first_line(error)) from error
    except ValueError as error:
        raise Refusal(first_line(error)) from error


def _check(arguments):
    """What can be known to be wrong before TensorFlow is imported."""
    if not arguments.name and not arguments.gin_file:
        raise Refusal("Name a TASK, or give the --gin_file of a run; `switch-tf tasks` lists what there is.")
    if arguments.gin_bindings and not arguments.gin_file:
        raise Refusal("--gin.NAME=VALUE changes what gin files say: give a --gin_file.")
    try:
        checks.integer("--num_processes", arguments.num_processes, at_least=1)
        if arguments.num_shards is not None:
            checks.integer("--num_shards", arguments.num_shards, at_least=1)
    except ValueError as error:
        raise Refusal(str(error)) from error
    words = [word for word in arguments.beam_flags if not word.startswith("--")]
    if words:
        raise Refusal(f"{words[0]!r} is no flag of Apache Beam; behind -- each is one word, such as "
                      "--runner=DataflowRunner.")


def _plain_value_of(macro, statements):
    """What gin files that are those of a whole run set a macro to; None where they don't."""
    try:
        return statements.value(statements.macros.get(macro))
    except Unknown as error:
        raise Refusal(f"{macro} must be a plain value here, not {error}.") from error


def _value_of(macro, files):
    """What a macro is, once gin has read the files; a task that a function makes is made by asking."""
    try:
        return copy.deepcopy(gin.query_parameter(f"{macro}/macro.value"))
    except ValueError as error:
        raise Refusal(f"{' and '.join(files)} set no {macro}: name the TASK.") from error


def _missing(shards):
    """Shards that have to be written; those that are there are read once, to see that they are whole."""
    from tqdm import tqdm

    from switch_tf import data

    there = [shard for shard in shards if shard.description.exists()]
    if not there:
        return shards
    whole = {shard.file for shard in tqdm(there, desc="checking what is there", unit=" shards", mininterval=0.5)
             if data.is_complete(shard)}
    return [shard for shard in shards if shard.file not in whole]


def _write(missing, num_shards, arguments):
    """Runs the pipeline over the missing shards.

    Raises:
        Refusal: Beam is missing or refuses its flags, or a shard could not be written; the others are.
    """
    beam = _import_beam()
    try:
        options = beam.options.pipeline_options.PipelineOptions(_flags(arguments, len(missing)))
        for shard in missing:
            _failure_of(shard).unlink(missing_ok=True)
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(missing, num_shards, done), daemon=True)
        watcher.start()
        try:
            with beam.Pipeline(options=options) as pipeline:
                # As plain values: a Shard would import TensorFlow in the worker before `setup` does so quietly.
                _ = (pipeline | beam.Create([dataclasses.asdict(shard) for shard in missing]) | beam.Reshuffle()
                     | beam.ParDo(_do_fn(beam)(gin.config_str())))
        finally:
            done.set()
            watcher.join()
    except SystemExit as error:  # argparse's, which has told why
        raise Refusal(f"Apache Beam does not take {' '.join(arguments.beam_flags)}, as it says above.") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise Refusal(f"Apache Beam ended with: {first_line(error)} The shards that are written stay; the same command "
                      "goes on.") from error
    failures = [_failure_of(shard) for shard in missing if _failure_of(shard).exists()]
    if failures:
        told = json.loads(failures[0].read_text())["sentence"]
        for failure in failures:
            failure.unlink()
        raise Refusal(f"{told} {len(failures)} of {num_shards} shards are not written, the others are; the same "
                      "command goes on.")


def _import_beam():
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    try:
        with quiet.held_back():
            import apache_beam
            import apache_beam.options.pipeline_options
    except ImportError as error:
        raise Refusal(f"`switch-tf cache` runs on Apache Beam, which cannot be imported ({error}): pip install "
                      "'switch-tf[beam]', or apache-beam as requirements-dev.txt pins it.") from error
    return apache_beam


def _flags(arguments, num_missing):
    flags = arguments.beam_flags
    if any(flag.startswith("--runner") for flag in flags):
        return flags
    workers = min(arguments.num_processes, num_missing)
    mode = "multi_processing" if workers > 1 else "in_memory"
    return ["--runner=DirectRunner", f"--direct_running_mode={mode}", f"--direct_num_workers={workers}",
            "--default_sdk_harness_log_level=ERROR", *flags]


def _do_fn(beam):
    """The pipeline's one step, as a class; Beam is imported late, so the class is made late."""

    class WriteShard(beam.DoFn):
        def __init__(self, configuration):
            self._configuration = configuration

        def setup(self):
            quiet.import_tensorflow()
            gin.clear_config()
            gin.parse_config(self._configuration)
            _make_task()

        def process(self, fields):
            from switch_tf import data

            shard = data.Shard(**fields)
            try:
                data.write_shard(shard)
            except (ValueError, OSError) as error:  # for the command to tell; the other shards are worth having
                _failure_of(shard).write_text(json.dumps({"sentence": first_line(error)}))

    return WriteShard


def _make_task():
    """Has a task that a function of the gin files makes, made."""
    try:
        copy.deepcopy(gin.query_parameter("MIXTURE_OR_TASK_NAME/macro.value"))
    except ValueError:  # the files name none, so what they import has registered it
        return


def _failure_of(shard):
    """Where a worker says why a shard could not be written."""
    return pathlib.Path(shard.folder, f".{shard.file.name}.failure")


def _watch(missing, num_shards, done):
    """Shows how many shards are written, of how many examples, until it is told that no more will be."""
    from tqdm import tqdm

    started, waiting, examples = time.perf_counter(), set(missing), 0
    with tqdm(total=num_shards, initial=num_shards - len(missing), desc="tokenising", unit=" shards",
              mininterval=0.5) as progress:
        is_last = False
        while not is_last:
            is_last = done.wait(_LOOK_PERIOD)
            for shard in [shard for shard in waiting if shard.description.exists()]:
                waiting.remove(shard)
                examples += json.loads(shard.description.read_text())["examples"]
                rate = examples / (time.perf_counter() - started)
                progress.set_postfix_str(f"{examples:,} examples, {rate:,.0f} a second", refresh=False)
                progress.update()


def _finish(shards, stream):
    """Writes the manifests, and says what is cached."""
    from switch_tf import data

    folders = {}
    for shard in shards:
        folders.setdefault(shard.folder, []).append(shard)
    caches = []
    for folder, members in folders.items():
        manifest = data.finish_cache(members)
        caches.append({"task": members[0].task, "split": members[0].split, "folder": folder,
                       "num_shards": len(members), "examples": manifest["examples"], "tokens": manifest["tokens"],
                       "bytes": manifest["bytes"]})
        tokens = ", ".join(f"{count:,} tokens of {feature}" for feature, count in manifest["tokens"].items() if count)
        print(f"{members[0].task}, split {members[0].split}: {manifest['examples']:,} examples, {tokens}, "
              f"{manifest['bytes'] / 2**20:.1f} MB in {len(members)} shards: {folder}", file=stream)
    root = pathlib.Path(caches[0]["folder"]).parent.parent
    print(f"Use it:  --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR=\"'{root}'\"", file=stream)
    return {"cache_dir": str(root), "caches": caches}
