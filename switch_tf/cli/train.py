"""`switch-tf train`: gin files in, a run folder out."""

import atexit
import os
import sys

from switch_tf.cli import gin_files, gin_run, starting
from switch_tf.training import processes
from switch_tf.training.stopping import INTERRUPTED, Stopping

EXAMPLES = r"""
switch-tf train --gin_file=gin/runs/demo.gin
switch-tf train --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin \
    --gin_file=gin/runs/pretrain.gin --gin.MODEL_DIR="'runs/first'" --gin.TRAIN_STEPS=300 \
    --gin.BATCH_SIZE=32
"""


def add_arguments(parser) -> None:
    """Declares the gin arguments, `--devices` and `--processes`."""
    gin_files.add_arguments(parser)
    parser.add_argument("--devices", type=int, metavar="N",
                        help="virtual devices to make of this machine's CPU, in all processes together")
    parser.add_argument("--processes", type=int, default=1, metavar="N",
                        help="start so many processes on this machine, which train together; on several machines set "
                             "TF_CONFIG instead (docs/layouts.md)")


def run(arguments) -> dict:
    """Trains to the last step or until interrupted; the summary of the run is the JSON object."""
    if arguments.processes != 1:
        gin_run.look(arguments.gin_file, arguments.gin_bindings, arguments.gin_search_paths)
        return {"exit_status": processes.run(arguments.words, arguments.processes, arguments.devices)}
    gin_run.load(arguments, num_cpu_devices=processes.devices_of_this_process(arguments.devices), check=starting.check)
    training = _start(arguments)

    import tensorflow as tf

    from switch_tf.evaluation import examples_shown
    from switch_tf.partitioning.partitioner import is_lost_process
    try:
        with training, Stopping(training.progress.say) as stopping:
            training.advance(training.run.train_steps, lambda: stopping.reason)
            summary = training.finish()
            shown = ""
            if training.run.shown_examples and not summary["interrupted"]:
                predictions = examples_shown.predict(training.state.model, training.run, training.partitioner)
                shown = examples_shown.describe(predictions)
    except tf.errors.OpError as error:
        if training.partitioner.num_processes == 1 or not is_lost_process(error):
            raise
        print(f"switch-tf train: {training.lost_process(str(error))}", file=sys.stderr, flush=True)
        os._exit(2)  # what TensorFlow would wait for at the end is gone
    exit_status = INTERRUPTED if summary["interrupted"] else 0
    if training.state.batches.is_stuck:  # TensorFlow would wait at the end for what it waits for now
        atexit.register(os._exit, exit_status)
    if not training.partitioner.is_chief:
        return {"exit_status": exit_status}
    print("\n\n".join(filter(None, [shown, describe(summary)])), file=sys.stderr if arguments.json else sys.stdout)
    return {**summary, "exit_status": exit_status}


def _start(arguments):
    """Starts the run that gin describes."""
    import gin

    described = gin_run.on_this_machine()
    with starting.converted(described.run) as weights:
        trainer = gin_run.or_mistake(lambda: starting.make_trainer(described, weights))
        return trainer.start(starting.origin(arguments.words, trainer.model.config) + gin.operative_config_str())


def describe(summary) -> str:
    """The end of a run in a few lines."""
    from switch_tf.reporting import names, report
    lines, shares = [f"Step {summary['step']}."], names.shares(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            share = f" (the last {value['last'] / value['first']:.0%} of the first)" if name.endswith("/loss") else ""
            lines.append(f"{name}: {report.describe(value, name in shares)}{share}")
        elif name.startswith("eval/"):
            lines.append(f"{name}: {value:.4f}, a model that knows only how frequent each token is")
    if "train/tokens_per_second" in summary:
        lines.append(f"{summary['train/tokens_per_second']:,.0f} tokens/s (median)")
    return "\n".join([*lines, f"Report: {summary['report']}", f"Plot:   {summary['plot']}"])
