"""`switch-tf train`, `compare` and `eval`."""

import atexit
import contextlib
import dataclasses
import itertools
import re
from argparse import Namespace

from etils import epy

from switch_tf import environment
from switch_tf.checkpoints import continuation, folders
from switch_tf.checkpoints.run_folder import follow, select
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
from switch_tf.comparison import Comparison, fairness, run_folders
from switch_tf.comparison.description import check_words, naming
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.experiment import Experiment
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.refusals import Outage, Refusal, first_line
from switch_tf.reporting import report
from switch_tf.statuses import EPILOG, FINISHED, INTERRUPTED
from switch_tf.storage import lock, outputs, places
from switch_tf.training import processes, stopping

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import experiments
    from switch_tf.comparison import driver
    from switch_tf.evaluation import split_evaluator
    from switch_tf.training import speed

TRAIN_EXAMPLES = r"""
switch-tf train demo
switch-tf train switch_tiny docs_corpus --model_dir runs/first --steps 300 --batch_size 32
"""
TRAIN_ARGUMENTS = (
    *options.GIN,
    *options.run_macros(),
    *options.device_options(),
    option("--processes",
           "processes to start on this machine, which train together on the --devices; on several machines set "
           "TF_CONFIG instead (docs/layouts.md)", "N", type=int, default=1),
    EPILOG,
)


@outputs.outlived()
def run_train(arguments: Namespace) -> dict:
    """Trains to the last step or until interrupted. Returns the run's summary."""
    if arguments.processes != 1:
        options.look(arguments)
        return {"exit_status": processes.run(arguments.words, arguments.processes, arguments.devices)}
    with stopping.at_start(), processes.one_of_several("train"):
        described = options.load(arguments, (), processes.devices_of_this_process(arguments.devices),
                                 continuation.check_early)
        clock = speed.Clock(environment.process_age())
        clock.enter("start/devices")
        described = experiments.place_here(described)
        with processes.CommonEnd(described.partitioner, "train") as common_end:
            clock.enter("start/data")
            trainer, configuration = experiments.make_trainer(described, arguments.words)
            training = trainer.start(configuration, clock=clock)
            common_end.message = training.lost_process
            with training, stopping.Stopping(training.progress.say) as stop:
                stop.watch([training])
                training.advance(training.run.train_steps, lambda: stop.reason)
                summary = training.finish()
                shown = ""
                if training.run.shown_examples and not summary["interrupted"]:
                    shown = split_evaluator.describe_examples(split_evaluator.predict_examples(
                        training.state.model, training.run, training.partitioner))
    exit_status = INTERRUPTED if summary["interrupted"] else FINISHED
    if training.state.batches.is_stuck:  # TensorFlow would wait for the input
        atexit.register(outputs.end, exit_status)
    if not training.partitioner.is_chief:
        return {"exit_status": exit_status}
    print(*filter(None, [shown, report.describe_summary(summary)]), sep="\n\n")
    return {**summary, "exit_status": exit_status}


COMPARE_EXAMPLES = r"""
switch-tf compare demo
switch-tf compare --runs runs/dense runs/sparse --output runs/report
"""
COMPARE_ARGUMENTS = (
    *options.GIN,
    *options.run_macros("seed"),
    option("--runs", "train nothing, and compare these run folders, or all runs of a comparison's folder",
           "FOLDER", nargs="+", default=[]),
    option("--output", "where the report on --runs goes (default: the folder 'comparison')", "FOLDER",
           goes_with="--runs; a comparison that trains writes into its own folder, Comparison.model_dir."),
    EPILOG,
)


def run_compare(arguments: Namespace) -> dict:
    """Trains the remaining steps, writes the report and prints its table. Returns comparison.json's content."""
    if arguments.runs:
        if arguments.gin_file or arguments.gin_bindings:
            raise Refusal("--runs compares runs that were trained; leave out --gin_file and --gin bindings.")
        output = arguments.output or "comparison"
        with lock.held(output):
            return run_folders.report(output, run_folders.find(arguments.runs))
    comparison, bindings = read_comparison(arguments)

    def make_trainer(name, seed):
        described = experiments.place_here(Experiment.from_gin(
            *comparison.words(name, seed, bindings), arguments.gin_search_paths))
        if described.partitioner.num_processes > 1:
            raise Refusal("variants take turns in one process; train each by itself where there are several, and "
                          "compare the run folders with --runs.")
        return experiments.make_trainer(described, arguments.words)

    with (outputs.outlived(), stopping.at_start(),
          lock.held(comparison.model_dir, "Comparison.model_dir")):
        quiet.import_tensorflow()
        is_done = driver.train(comparison, make_trainer)
        runs = [(name, comparison.folder(name, seed)) for name in comparison.variants for seed in comparison.seeds]
        try:
            result = run_folders.report(comparison.model_dir, runs, is_done)
        except places.BucketError as error:
            raise Outage(f"The runs are saved, but not their report, because {error.filename} cannot be reached "
                         f"({first_line(error.strerror)}); the same command writes it.") from error
    return {**result, "exit_status": FINISHED if is_done else INTERRUPTED}


def read_comparison(arguments: Namespace) -> tuple[Comparison, list[str]]:
    """Returns the Comparison, and the command line's bindings for every variant. Needs no TensorFlow."""
    files, paths = arguments.gin_file, arguments.gin_search_paths
    if not files:
        raise Refusal("Name what to compare: models and a task, as in `switch-tf compare switch_tiny t5_tiny --task "
                      "docs_corpus`, a file of gin/comparisons such as demo, or run folders with --runs.")
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
    configs = {}
    for name in comparison.variants:
        with naming(name):
            files, words = comparison.words(name, comparison.seeds[0], variant_bindings)
            described = Experiment.from_gin(files, words, paths)
            configs[name], run = described.config, described.run
            if run.patience:
                raise Refusal("a comparison trains all variants to the last step; leave PATIENCE at 0, not "
                              f"{run.patience}.")
            if not run.eval_period:
                raise Refusal("a comparison is one of held-out losses; set EVAL_PERIOD above 0.")
    if all(configs.values()):
        fairness.check_work(configs, run.task_feature_lengths, comparison.unequal_work)
    return comparison, variant_bindings


EVAL_EXAMPLES = r"""
switch-tf eval runs/first --step best
switch-tf eval runs/first --follow
"""
EVAL_ARGUMENTS = (
    *options.RUN,
    option("--step", "a step, the best one by the run's BEST_METRIC, the newest (default) or each of them",
           "N|best|last|all", default="last"),
    option("--split", "of the tasks (default validation)", "NAME", default="validation"),
    count("--examples", "largest number of examples of each task with metrics (default: all)"),
    option("--output", "where scores and predictions go (default RUN/eval)", "FOLDER"),
    *options.device_options(),
    option("--follow", "go on with each new checkpoint of a run that is training, until the run ends"),
)


@processes.one_of_several("eval")
def run_eval(arguments: Namespace) -> dict:
    """Evaluates checkpoints, prints tables, and writes scores and predictions. Returns the scores."""
    folder = options.folder_of(arguments)
    checkpoints = []
    if not arguments.follow or arguments.step != "last":
        checkpoints = select(folder, arguments.step, hint=", or add --follow")
    if arguments.follow and len(cluster.members().addresses) > 1:
        raise Refusal("--follow works in one process, because each would see new checkpoints at another time; unset "
                      "TF_CONFIG, or leave out --follow.")
    described = options.load_run(arguments, folder, processes.devices_of_this_process(arguments.devices))
    for checkpoint in checkpoints:
        folders.check_size(described.config, checkpoint)
    steps = [int(checkpoint.name.removeprefix("step_")) for checkpoint in checkpoints]
    new = follow(folder, described.run.train_steps, steps) if arguments.follow else ()
    output = places.at(arguments.output or folder / "eval")
    results = []
    with processes.CommonEnd(described.partitioner, "eval"), contextlib.ExitStack() as closing:
        processes.agree(described.partitioner, {
            **{type(part).__name__: dataclasses.asdict(part) for part in (
                described.config, described.run, described.settings, described.partitioner.layout)},
            "--split": arguments.split, "--examples": arguments.examples, "--step": steps})
        evaluator = closing.enter_context(contextlib.closing(split_evaluator.CheckpointEvaluator(
            described, arguments.split, arguments.examples, output)))
        for checkpoint in itertools.chain(checkpoints, new):
            try:
                results.append(evaluator.evaluate(checkpoint))
            except folders.BrokenCheckpoint:
                if checkpoint.is_dir():
                    raise
                outputs.say(f"{checkpoint} was removed by its run before it was read.")
                continue
            if described.partitioner.is_chief:
                print(split_evaluator.describe(results[-1]), flush=True)
    if described.partitioner.is_chief:
        print(f"Scores and predictions: {output}")
    return {"run": str(folder), "split": arguments.split, "output": str(output), "results": results}
