"""`switch-tf average`: writes the mean of the weights of the last checkpoints of a run."""

import argparse

from etils import epy

from switch_tf.cli import options
from switch_tf.installation import quiet
from switch_tf.storage import places
from switch_tf.surgery import sources

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.surgery import averaging

EXAMPLES = r"""
switch-tf average --run runs/first --last 3 --output first_mean
switch-tf average --run runs/first --last 10 --output first_mean --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, the number of its checkpoints, and the output."""
    parser.add_argument("--run", required=True, metavar="FOLDER", help="a run folder")
    parser.add_argument("--last", required=True, at_least=2,
                        help="number of its newest checkpoints")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the mean; returns the steps that it is of."""
    folder = places.at(arguments.run)
    checkpoints = sources.newest(folder, arguments.last)
    sources.check_same(checkpoints)
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return averaging.average_run(folder, checkpoints, output)
