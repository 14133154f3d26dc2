"""`switch-tf verify-layout`: compares the step of a gin run under its layout with the same step on one device."""

import sys
import tempfile

from switch_tf.cli import gin_files, gin_run
from switch_tf.partitioning import collectives
from switch_tf.refusals import Refusal

EXAMPLES = r"""
switch-tf verify-layout --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin \
    --gin_file=gin/runs/pretrain.gin --gin_file=gin/layouts/expert.gin --gin.BATCH_SIZE=16
switch-tf verify-layout --gin_file=gin/runs/demo.gin --gin_file=gin/layouts/data.gin --devices 4
"""


def add_arguments(parser) -> None:
    """Declares the gin arguments, `--devices` and `--steps`."""
    gin_files.add_arguments(parser)
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="virtual CPU devices (default 8)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="training steps to compare (default 3)")


def run(arguments) -> dict:
    """Prints and returns the largest differences and the collectives. Status 1 means that they are too large.

    Computes in float64 unless ACTIVATION_DTYPE is set. MODEL_DIR is not needed.
    """
    if arguments.steps < 1 or arguments.devices < 1:
        raise Refusal(f"--steps and --devices must be at least 1, not {arguments.steps} and {arguments.devices}.")
    with tempfile.TemporaryDirectory() as dumps:
        collectives.dump_partitioned_programs(dumps)
        gin_run.load(arguments, ["MODEL_DIR='unused'", "ACTIVATION_DTYPE='float64'"], arguments.devices)
        _skip_graph_optimisation()
        verification, layout, dtype = _verify(arguments.steps)
        sent = [collective for function in ("computed", "applied") for collective in collectives.read(dumps, function)]
    from switch_tf.training import verification_report

    result = verification_report.as_json(verification, layout, dtype, sent)
    print(verification_report.describe(verification, result, dtype), file=sys.stderr if arguments.json else sys.stdout)
    return result


def _skip_graph_optimisation():
    """Turns off an optimisation that takes longer, once for each device, than the few steps that follow."""
    import tensorflow as tf
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _verify(num_steps):
    from switch_tf import data
    from switch_tf.training import verification

    described = gin_run.on_this_machine()
    run, settings = described.run, described.settings
    if settings.steps_per_call != 1:
        raise Refusal(f"Steps are compared one by one, so steps_per_call must be 1, not {settings.steps_per_call}.")
    description = data.description_of_data(run, described.config, "train", run.seed)
    data.check_examples(description)
    with data.refusing_bad_data():
        batches = list(data.get_dataset(description).take(num_steps))
    result = verification.verify(
        described.make_model, described.make_optimizer, described.partitioner, list(batches), run.seed, settings,
        say=lambda text: print(text, file=sys.stderr, flush=True), make_objective=described.make_objective)
    return result, described.layout, described.make_model().compute_dtype
