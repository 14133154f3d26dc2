"""`switch-tf eval`: scores the checkpoints of a run by the metrics of their tasks."""

import argparse
import contextlib
import dataclasses
import itertools
import sys

from etils import epy

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.checkpoints.run_folder import follow, select
from switch_tf.cli import gin_files, trained_run
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.training import processes

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.evaluation import split_evaluator

EXAMPLES = r"""
switch-tf eval --run runs/first --step best
switch-tf eval --run runs/first --follow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, its checkpoints, the split, and the gin arguments that change its task or layout."""
    trained_run.add_arguments(parser)
    parser.add_argument("--step", default="last", metavar="N|best|last|all",
                        help="a step, the best one by the run's BEST_METRIC, the newest (default) or each of them")
    parser.add_argument("--split", default="validation", metavar="NAME", help="of the tasks (default validation)")
    parser.add_argument("--examples", type=int, at_least=1, metavar="N",
                        help="largest number of examples of each task with metrics (default: all)")
    parser.add_argument("--output", metavar="FOLDER", help="where scores and predictions go (default RUN/eval)")
    gin_files.add_device_arguments(parser)
    parser.add_argument("--follow", action="store_true",
                        help="go on with each new checkpoint of a run that is training, until the run ends")


@processes.one_of_several("eval")
def run(arguments: argparse.Namespace) -> dict:
    """Evaluates the checkpoints, prints a table for each and writes scores and predictions; returns the scores."""
    folder = trained_run.folder_of(arguments)
    waits_for_first = arguments.follow and arguments.step == "last"
    checkpoints = [] if waits_for_first else select(folder, arguments.step, hint=", or add --follow")
    num_devices = processes.devices_of_this_process(arguments.devices)
    if arguments.follow and len(cluster.members().addresses) > 1:
        raise Refusal("--follow works in one process, because each would see new checkpoints at another time; unset "
                      "TF_CONFIG, or leave out --follow.")
    described = trained_run.load(arguments, folder, num_devices)
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
            except BrokenCheckpoint:
                if checkpoint.is_dir():
                    raise
                print(f"{checkpoint} was removed by its run before it was read.", file=sys.stderr, flush=True)
                continue
            if described.partitioner.is_chief:
                print(split_evaluator.describe(results[-1]), file=arguments.stream, flush=True)
    if described.partitioner.is_chief:
        print(f"Scores and predictions: {output}", file=arguments.stream)
    return {"run": str(folder), "split": arguments.split, "output": str(output), "results": results}
