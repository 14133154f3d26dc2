"""`switch-tf verify-layout`: compares the step of a gin run under its layout with the same step on one device."""

import argparse
import tempfile

from etils import epy

from switch_tf.cli import options
from switch_tf.partitioning import collectives

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import experiments
    from switch_tf.training import verification

VERIFY_LAYOUT_EXAMPLES = r"""
switch-tf verify-layout --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin \
    --gin_file=gin/runs/pretrain.gin --gin_file=gin/layouts/expert.gin --gin.BATCH_SIZE=16
switch-tf verify-layout --gin_file=gin/runs/demo.gin --gin_file=gin/layouts/data.gin --devices 4
"""


def add_verify_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the gin arguments, the devices and `--steps`."""
    options.add_gin_arguments(parser)
    options.add_device_arguments(parser, num_devices=8)
    parser.add_argument("--steps", at_least=1, default=3,
                        help="training steps to compare (default 3)")


def run_verify_layout(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Prints and returns the largest differences and the collectives. Status 1 means that they are too large.

    Computes in float64 unless ACTIVATION_DTYPE is set. MODEL_DIR is not needed.
    """
    with tempfile.TemporaryDirectory() as dumps:
        collectives.dump_partitioned_programs(dumps)
        described = options.load(arguments, ["MODEL_DIR='unused'", "ACTIVATION_DTYPE='float64'"], arguments.devices)
        return verification.verify(experiments.on_this_machine(described), arguments.steps, dumps)
