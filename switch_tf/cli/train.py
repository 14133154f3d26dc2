"""`switch-tf train`: gin files in, a run folder out."""

import argparse
import atexit
import sys

from etils import epy

from switch_tf.checkpoints import continuation
from switch_tf.cli import gin_files
from switch_tf.reporting import report
from switch_tf.statuses import EPILOG, FINISHED, INTERRUPTED
from switch_tf.storage import outputs
from switch_tf.training import processes
from switch_tf.training.stopping import Stopping, at_start

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import experiments
    from switch_tf.conversion import initial_weights
    from switch_tf.evaluation import examples_shown

EXAMPLES = r"""
switch-tf train --gin_file=gin/runs/demo.gin
switch-tf train --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin \
    --gin_file=gin/runs/pretrain.gin --gin.MODEL_DIR="'runs/first'" --gin.TRAIN_STEPS=300 \
    --gin.BATCH_SIZE=32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the gin arguments, the devices and `--processes`."""
    gin_files.add_arguments(parser)
    gin_files.add_device_arguments(parser)
    parser.add_argument("--processes", type=int, default=1, metavar="N",
                        help="processes to start on this machine, which train together on the --devices; on several "
                             "machines set TF_CONFIG instead (docs/layouts.md)")
    parser.epilog = f"{parser.epilog} {EPILOG}"


@outputs.outlived()
def run(arguments: argparse.Namespace) -> dict:
    """Trains to the last step or until interrupted; returns the summary of the run."""
    if arguments.processes != 1:
        gin_files.look(arguments)
        return {"exit_status": processes.run(arguments.words, arguments.processes, arguments.devices)}
    num_devices = processes.devices_of_this_process(arguments.devices)
    with at_start(), processes.one_of_several("train"):
        described = gin_files.load(arguments, num_cpu_devices=num_devices, check=continuation.check_early)
        described = experiments.on_this_machine(described)
        with processes.CommonEnd(described.partitioner, "train") as common_end:
            weights = initial_weights.opened(described.run, described.config)
            trainer, configuration = experiments.make_trainer(described, weights, arguments.words)
            training = trainer.start(configuration)
            common_end.message = training.lost_process
            with training, Stopping(training.progress.say) as stopping:
                stopping.watch([training])
                training.advance(training.run.train_steps, lambda: stopping.reason)
                summary = training.finish()
                shown = ""
                if training.run.shown_examples and not summary["interrupted"]:
                    predictions = examples_shown.predict(training.state.model, training.run, training.partitioner)
                    shown = examples_shown.describe(predictions)
    exit_status = INTERRUPTED if summary["interrupted"] else FINISHED
    if training.state.batches.is_stuck:  # TensorFlow would wait for the input
        atexit.register(outputs.end, exit_status)
    if not training.partitioner.is_chief:
        return {"exit_status": exit_status}
    text = "\n\n".join(filter(None, [shown, report.describe_summary(summary)]))
    print(text, file=sys.stderr if arguments.json else sys.stdout)
    return {**summary, "exit_status": exit_status}
