"""`switch-tf compare`: dense and sparse variants trained on the same batches in turns, and what came out of it."""

import contextlib
import pathlib
import re
import sys

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.cli import gin_files, gin_run, outputs, quiet, starting
from switch_tf.comparison import Comparison, fairness
from switch_tf.comparison.description import check_words
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal
from switch_tf.training.stopping import INTERRUPTED, Stopping

_SEED = re.compile(r"seed_\d+")

EXAMPLES = r"""
switch-tf compare --gin_file=gin/comparisons/demo.gin
switch-tf compare --runs runs/dense runs/sparse --output runs/report
"""


def add_arguments(parser) -> None:
    """Declares the gin arguments, and the runs to report on in their place."""
    gin_files.add_arguments(parser)
    parser.add_argument("--runs", nargs="+", default=[], metavar="FOLDER",
                        help="train nothing, and compare these run folders, or all runs of a comparison's folder")
    parser.add_argument("--output", metavar="FOLDER",
                        help="where the report on --runs goes (default: the folder 'comparison')")


def run(arguments) -> dict:
    """Trains what is left to train, writes the report and prints its table; comparison.json is the JSON object."""
    if arguments.runs:
        if arguments.gin_file or arguments.gin_bindings:
            raise Refusal("--runs compares runs that were trained; leave out --gin_file and --gin bindings.")
        output = arguments.output or "comparison"
        with outputs.locked(output):
            return _report(output, _named(arguments.runs), arguments.json)
    if arguments.output:
        raise Refusal("--output goes with --runs; a comparison that trains writes into its own folder, "
                      "Comparison.model_dir.")
    comparison, bindings = described(arguments)
    with outputs.locked(comparison.model_dir, "Comparison.model_dir"):
        quiet.import_tensorflow(None)
        is_done = _train(comparison, bindings, arguments.words)
        runs = [(name, comparison.folder(name, seed)) for name in comparison.variants for seed in comparison.seeds]
        found = _report(comparison.model_dir, runs, arguments.json, is_done)
    return {**found, "exit_status": 0 if is_done else INTERRUPTED}


# What the gin files say.


def described(arguments) -> tuple[Comparison, list[str]]:
    """The Comparison, and the bindings of the command line that are not its own but every variant's.

    Raises:
        Refusal: what is wrong with it, or with a variant, as far as that is seen without TensorFlow.
    """
    files, paths = arguments.gin_file, arguments.gin_search_paths
    if not files:
        raise Refusal("A comparison is described by a gin file: --gin_file=gin/comparisons/demo.gin; or give run "
                      "folders with --runs.")
    macros = gin_files.collect(files, (), paths).macros
    own, others = [], []
    for binding in arguments.gin_bindings:
        name = binding.partition("=")[0]
        is_own = name in macros or re.search(r"(^|\.)Comparison\.\w+$", name)
        (own if is_own else others).append(binding)
    statements = gin_files.read(files, own, paths)
    comparison = gin_run.described(Comparison, statements)
    if comparison is None:
        raise Refusal(f"These gin files describe no comparison: {', '.join(files)}. A comparison binds model_dir and "
                      "variants of switch_tf.comparison.Comparison, as gin/comparisons/demo.gin does.")
    for _, name, parameter in statements.parameters:
        if not name.endswith(".Comparison"):
            raise Refusal(f"These gin files bind {name.rpartition('.')[2]}.{parameter}, which the comparison itself "
                          "does not read: put the file that does so into Comparison.common, or into a variant.")
    gin_run.or_mistake(lambda: check_words("The command line", others))
    _look(comparison, others, paths)
    return comparison, others


def _look(comparison, bindings, search_paths):
    """Refuses variants that describe no run, or that do not do the same work."""
    seen = {}
    for name in comparison.variants:
        words = comparison.words(name, comparison.seeds[0], bindings)
        seen[name] = _of(name, lambda words=words: _look_at_one(words, search_paths))
    if all(config and run for config, run in seen.values()):
        lengths = next(iter(seen.values()))[1].task_feature_lengths
        gin_run.or_mistake(lambda: fairness.check_work({name: config for name, (config, _) in seen.items()}, lengths,
                                                       comparison.unequal_work))


def _look_at_one(words, search_paths):
    config, run = gin_run.look(*words, search_paths)
    if run:
        fairness.check_run(run)
    return config, run


# Training.


def _train(comparison, bindings, words):
    """Trains what is left of all seeds; returns whether nothing is left now."""
    from switch_tf.checkpoints import tensors
    from switch_tf.checkpoints.best import UnknownMetric
    from switch_tf.comparison.progress import Progress
    from switch_tf.comparison.same_batches import DifferentBatches
    from switch_tf.comparison.turns import VariantFailed
    from switch_tf.data import FailedMetric
    from switch_tf.training import diagnosis
    told = (diagnosis.Divergence, tensors.BrokenCheckpoint, FailedMetric, UnknownMetric, DifferentBatches,
            ValueError, OSError)
    try:
        with contextlib.closing(Progress()) as progress:
            return all(_train_seed(comparison, seed, bindings, words, progress) for seed in comparison.seeds)
    except (VariantFailed, *told) as error:
        if isinstance(error, VariantFailed) and not isinstance(error.__cause__, told):
            raise
        raise Refusal(first_line(error)) from error


def _train_seed(comparison, seed, bindings, words, progress):
    """The same of one seed."""
    from switch_tf.comparison import turns
    with contextlib.ExitStack() as stack:
        trainers, texts = {}, {}
        for name in comparison.variants:
            trainers[name], texts[name] = _of(
                name, lambda name=name: _trainer(comparison, name, seed, bindings, words, stack))
        _check_together(comparison, trainers)
        num_steps = sum(trainer.run.train_steps for trainer in trainers.values())
        progress.begin(num_steps * len(comparison.seeds))
        if all(_is_done(trainer.run) for trainer in trainers.values()):
            progress.skip(num_steps)
            progress.say(f"Seed {seed}: all variants are trained.")
            return True
        stopping = stack.enter_context(Stopping(progress.say))
        return turns.train(trainers, texts, progress, pathlib.Path(comparison.model_dir) / f"batches_{seed}.jsonl",
                           comparison.turn, lambda: stopping.reason)


def _trainer(comparison, name, seed, bindings, words, stack):
    """The trainer of a run, and the text of its configuration; `stack` holds what it needs until it is started."""
    import gin
    gin_files.apply(*comparison.words(name, seed, bindings))
    described = gin_run.on_this_machine()
    if described.partitioner.num_processes > 1:
        raise Refusal("variants take turns in one process; train each by itself where there are several, and compare "
                      "the run folders with --runs.")
    fairness.check_run(described.run)
    weights = stack.enter_context(starting.converted(described.run))
    trainer = starting.make_trainer(described, weights)
    return trainer, starting.origin(words, trainer.model.config) + gin.operative_config_str()


def _check_together(comparison, trainers):
    first = next(iter(trainers.values()))
    fairness.check_records({name: trainer.configuration for name, trainer in trainers.items()}, comparison.may_differ)
    fairness.check_work({name: trainer.model.config for name, trainer in trainers.items()},
                        first.run.task_feature_lengths, comparison.unequal_work)


def _is_done(run):
    saved = folders.steps(RunFolder.checkpoints_of(run.model_dir))
    return bool(saved) and saved[-1] >= run.train_steps


def _of(name, action):
    """Does what belongs to one variant; what is wrong with it is told with its name."""
    try:
        return action()
    except (Refusal, ValueError, OSError, folders.BrokenCheckpoint) as error:
        raise Refusal(f"{name}: {first_line(error)}") from error


# The report.


def _named(folders):
    """(name of a variant, run folder) of what --runs names; the folder of a comparison stands for all its runs."""
    runs = []
    for folder in map(pathlib.Path, folders):
        of_comparison = sorted(path.parent for path in folder.glob("*/seed_*/checkpoints"))
        if RunFolder.checkpoints_of(folder).is_dir() or not of_comparison:
            runs.append(folder)
        else:
            runs += of_comparison
    if len(runs) < 2:
        raise Refusal("--runs compares at least two run folders; name several, or the folder of a comparison.")
    places = [folder.resolve() for folder in runs]
    for folder, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            raise Refusal(f"--runs names {str(folder)!r} twice; name each run once.")
    return [((folder.parent if _SEED.fullmatch(folder.resolve().name) else folder).resolve().name, folder)
            for folder in runs]


def _report(output, runs, is_json, is_whole=True):
    from switch_tf.comparison import curves, report
    stream = sys.stderr if is_json else sys.stdout
    read = []
    for name, folder in runs:
        try:
            read.append(curves.read(folder, name))
        except ValueError as error:
            if is_whole:
                raise Refusal(first_line(error)) from error
    if not read:
        print("No run was evaluated yet, so there is no report.", file=sys.stderr)
        return {}
    try:
        found = report.write(output, curves.told_apart(read))
    except ValueError as error:
        raise Refusal(first_line(error)) from error
    except OSError as error:
        raise Refusal(f"The report cannot be written to {str(output)!r} ({error.strerror}).") from error
    print(report.table(found), *report.words(found), sep="\n", file=stream)
    print(f"Report: {pathlib.Path(output) / 'comparison.html'}\nPlot:   {pathlib.Path(output) / 'comparison.png'}",
          file=stream)
    return found
