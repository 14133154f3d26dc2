"""`switch-tf shrink`: makes a model with fewer experts, and measures the held-out loss before and after."""

import argparse

from etils import epy

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli import options
from switch_tf.conversion import model_gin
from switch_tf.conversion.formats import SWITCH_TF
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.surgery import sources

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.surgery import shrinking

EXAMPLES = r"""
switch-tf shrink --from runs/first --num_experts=4 --output small
switch-tf shrink --from runs/first/checkpoints/step_00000300 --num_experts=4 --output small --merge
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the checkpoint, the output, how experts become fewer, and the gin arguments of the run."""
    parser.add_argument("--from", dest="source", required=True, metavar="CHECKPOINT",
                        help="a run folder, for its newest checkpoint, or one of its checkpoints")
    parser.add_argument("--num_experts", required=True, type=int, metavar="K", help="experts that each layer keeps")
    options.add_output(parser)
    parser.add_argument("--merge", action="store_true",
                        help="merge the most similar experts; by default the most used ones are kept")
    options.add_trust(parser)
    options.add_gin_arguments(parser)


def run(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the smaller model; returns the losses and which experts are left."""
    source = places.at(arguments.source)
    folder = folders.run_folder_of(source)
    if not (folder / CONFIGURATION).is_file() or not (folder / "checkpoints").is_dir():
        raise Refusal("--from must be a run folder or one of its checkpoints, because the use of experts is measured "
                      f"on the task of the run; {str(source)!r} is neither.")
    checkpoint = sources.checkpoint_in(source, SWITCH_TF)
    sources.with_fewer_experts(model_gin.recorded(checkpoint), arguments.num_experts)
    with options.new_output(arguments) as output:
        described = options.load_run(arguments, folder, on_one_device=True)
        return shrinking.shrink_checkpoint(checkpoint, output, described, arguments.num_experts, arguments.merge)
