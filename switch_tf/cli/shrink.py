"""`switch-tf shrink`: makes a model with fewer experts, and measures the held-out loss before and after."""

import argparse

from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli import gin_files, trained_run
from switch_tf.conversion import model_gin
from switch_tf.conversion.formats import SWITCH_TF
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places
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
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--merge", action="store_true",
                        help="merge the most similar experts; by default the most used ones are kept")
    parser.add_argument("--trust", action="store_true",
                        help="run the gin file of the run even if it names modules that switch_tf does not ship; a gin "
                             "file is a program")
    gin_files.add_arguments(parser)


def run(arguments: argparse.Namespace) -> dict:
    """Writes the smaller model; returns the losses and which experts are left."""
    source, output = places.at(arguments.source), places.at(arguments.output)
    folder = folders.run_folder_of(source)
    if not (folder / CONFIGURATION).is_file() or not (folder / "checkpoints").is_dir():
        raise Refusal("--from must be a run folder or one of its checkpoints, because the use of experts is measured "
                      f"on the task of the run; {str(source)!r} is neither.")
    checkpoint = sources.checkpoint_in(source, SWITCH_TF)
    sources.with_fewer_experts(model_gin.recorded(checkpoint), arguments.num_experts)
    checks.new_folder(output)
    with lock.held(output):
        described = trained_run.load(arguments, folder, on_one_device=True)
        result, text = shrinking.shrink_checkpoint(checkpoint, output, described, arguments.num_experts,
                                                   arguments.merge)
    print(text, file=arguments.stream)
    return result
