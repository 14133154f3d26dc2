"""`switch-tf compare`: trains dense and sparse variants on the same batches, in turns, and reports on them."""

import argparse
import functools
import re
import sys

from etils import epy

from switch_tf.cli import gin_files
from switch_tf.comparison import Comparison, fairness, run_folders
from switch_tf.comparison.description import check_words, naming
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.experiment import Experiment
from switch_tf.installation import quiet
from switch_tf.refusals import Outage, Refusal, first_line
from switch_tf.statuses import EPILOG, FINISHED, INTERRUPTED
from switch_tf.storage import lock, outputs, places
from switch_tf.training import stopping

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import experiments
    from switch_tf.comparison import driver
    from switch_tf.conversion import initial_weights

EXAMPLES = r"""
switch-tf compare --gin_file=gin/comparisons/demo.gin
switch-tf compare --runs runs/dense runs/sparse --output runs/report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the gin arguments and, as an alternative, the runs to report on."""
    gin_files.add_arguments(parser)
    parser.add_argument("--runs", nargs="+", default=[], metavar="FOLDER",
                        help="train nothing, and compare these run folders, or all runs of a comparison's folder")
    parser.add_argument("--output", metavar="FOLDER",
                        help="where the report on --runs goes (default: the folder 'comparison')")
    parser.epilog = f"{parser.epilog} {EPILOG}"


def run(arguments: argparse.Namespace) -> dict:
    """Trains the remaining steps, writes the report and prints its table; returns the content of comparison.json."""
    if arguments.runs:
        if arguments.gin_file or arguments.gin_bindings:
            raise Refusal("--runs compares runs that were trained; leave out --gin_file and --gin bindings.")
        output = arguments.output or "comparison"
        with lock.held(output):
            return _report(output, run_folders.find(arguments.runs), arguments)
    if arguments.output:
        raise Refusal("--output goes with --runs; a comparison that trains writes into its own folder, "
                      "Comparison.model_dir.")
    comparison, bindings = described(arguments)
    with (outputs.outlived(), stopping.at_start(),
          lock.held(comparison.model_dir, "Comparison.model_dir")):
        quiet.import_tensorflow(None)
        is_done = driver.train(comparison, functools.partial(
            _trainer, comparison, bindings, arguments))
        runs = [(name, comparison.folder(name, seed)) for name in comparison.variants for seed in comparison.seeds]
        try:
            result = _report(comparison.model_dir, runs, arguments, is_done)
        except places.BucketError as error:
            raise Outage(f"The runs are saved, but not their report, because {error.filename} cannot be reached "
                         f"({first_line(error.strerror)}); the same command writes it.") from error
    return {**result, "exit_status": FINISHED if is_done else INTERRUPTED}


def _report(output, runs, arguments, is_complete=True):
    result, text = run_folders.report(output, runs, is_complete)
    print(text, file=sys.stdout if result and not arguments.json else sys.stderr)
    return result


def described(arguments: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """Returns the Comparison and the bindings of the command line that apply to every variant.

    Raises:
        Refusal: The comparison or a variant has a mistake that is found without TensorFlow.
    """
    files, paths = arguments.gin_file, arguments.gin_search_paths
    if not files:
        raise Refusal("A comparison is described by a gin file: --gin_file=gin/comparisons/demo.gin; or give run "
                      "folders with --runs.")
    said = gin_syntax.read(files, search_paths=paths)
    comparison_bindings, variant_bindings = [], []
    for binding in arguments.gin_bindings:
        name = binding.partition("=")[0]
        is_of_comparison = name in said.macros or re.search(r"(^|\.)Comparison\.\w+$", name)
        (comparison_bindings if is_of_comparison else variant_bindings).append(binding)
    said.bind(comparison_bindings)
    if not {"model_dir", "variants"} <= said.bound.get(("", parts.COMPARISON), {}).keys():
        raise Refusal(f"These gin files describe no comparison: {', '.join(files)}. A comparison binds model_dir and "
                      "variants of switch_tf.comparison.Comparison, as gin/comparisons/demo.gin does.")
    comparison = said.check().part(parts.COMPARISON).make()
    for (_, name), parameters in said.bound.items():
        if name != parts.COMPARISON:
            raise Refusal(f"These gin files bind {name.rpartition('.')[2]}.{next(iter(parameters))}, which the "
                          "comparison itself does not read: put the file that does so into Comparison.common, or into "
                          "a variant.")
    check_words("The command line", variant_bindings)
    _check_variants(comparison, variant_bindings, paths)
    return comparison, variant_bindings


def _check_variants(comparison, bindings, search_paths):
    """Refuses variants that describe no run, or that do not do the same work."""
    described = {}
    for name in comparison.variants:
        files, variant_bindings = comparison.words(name, comparison.seeds[0], bindings)
        with naming(name):
            described[name] = Experiment.from_gin(files, variant_bindings, search_paths)
            fairness.check_run(described[name].run)
    configs = {name: experiment.config for name, experiment in described.items()}
    if all(configs.values()):
        lengths = next(iter(described.values())).run.task_feature_lengths
        fairness.check_work(configs, lengths, comparison.unequal_work)


def _trainer(comparison, bindings, arguments, name, seed):
    """Returns the trainer of a run and the text of its configuration."""
    files, variant_bindings = comparison.words(name, seed, bindings)
    described = Experiment.from_gin(files, variant_bindings, arguments.gin_search_paths)
    described = experiments.on_this_machine(described)
    if described.partitioner.num_processes > 1:
        raise Refusal("variants take turns in one process; train each by itself where there are several, and compare "
                      "the run folders with --runs.")
    fairness.check_run(described.run)
    weights = initial_weights.opened(described.run, described.config)
    return experiments.make_trainer(described, weights, arguments.words)
