"""`switch-tf average`: writes the mean of the weights of the last checkpoints of a run."""

import argparse

from etils import epy

from switch_tf import checks
from switch_tf.installation import quiet
from switch_tf.storage import lock, places
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
    parser.add_argument("--last", required=True, type=int, at_least=2, metavar="N",
                        help="number of its newest checkpoints")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")


def run(arguments: argparse.Namespace) -> dict:
    """Writes the mean; returns the steps that it is of."""
    folder, output = places.at(arguments.run), places.at(arguments.output)
    checkpoints = sources.newest(folder, arguments.last)
    sources.check_same(checkpoints)
    checks.new_folder(output)
    with lock.held(output):
        quiet.import_tensorflow()
        result, text = averaging.average_run(folder, checkpoints, output)
    print(text, file=arguments.stream)
    return result
