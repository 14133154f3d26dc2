"""`switch-tf upcycle`: makes a sparse model, to train further, whose experts are copies of a dense model's layers."""

import argparse

from etils import epy

from switch_tf import checks
from switch_tf.cli import gin_files
from switch_tf.conversion.converting import check_optimizer
from switch_tf.conversion.formats import SWITCH_TF, locate
from switch_tf.installation import quiet
from switch_tf.storage import lock, places
from switch_tf.surgery import sources
from switch_tf.surgery.kernels import Changes

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.surgery import upcycling

EXAMPLES = r"""
switch-tf upcycle --from runs/dense --gin_file=gin/models/switch_tiny.gin --output sparse
switch-tf upcycle --from t5-base --gin_file=gin/models/switch_base_8.gin --output sparse --reinitialize=0.5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two folders, the differences between experts, and the gin arguments of the sparse model."""
    parser.add_argument("--from", dest="source", required=True, metavar="CHECKPOINT",
                        help="a dense model: a run folder, a checkpoint, or one of Hugging Face, T5X or Mesh "
                             "TensorFlow")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--noise", type=float, default=0.0, metavar="STDDEV",
                        help="noise on each expert's kernels, relative to their standard deviation (default 0)")
    parser.add_argument("--reinitialize", type=float, default=0.0, metavar="SHARE",
                        help="share of each expert's hidden units to draw anew (default 0)")
    parser.add_argument("--gate_scale", type=_factor, default=1.0, metavar="FACTOR",
                        help="factor of the experts' output kernels, against gates that do not sum to one (default 1); "
                             "auto for the one that keeps the size of each layer's output")
    parser.add_argument("--with_optimizer", action="store_true",
                        help="copy Adafactor's state and its step, too; start with "
                             "--gin.Run.initial_variables=\"'with_optimizer'\"")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    gin_files.add_arguments(parser)


def _factor(text):
    """Returns "auto" or a number. argparse shows the error."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, not {text!r}") from None


def run(arguments: argparse.Namespace) -> dict:
    """Writes the sparse model; returns what it is made of."""
    source, output = places.at(arguments.source), places.at(arguments.output)
    changes = Changes(arguments.noise, arguments.reinitialize, arguments.gate_scale, arguments.seed)
    source, source_format = locate(source, "--from")
    if arguments.with_optimizer:
        check_optimizer(source, source_format, SWITCH_TF)
    checks.new_folder(output)
    config = gin_files.read_model(arguments)[0]
    source = sources.checkpoint_in(source, source_format)
    dense = source_format.config_of(source)
    sources.check_compatible(sources.dense_twin(config) if dense is None else dense, config)
    with lock.held(output):
        quiet.import_tensorflow()
        result, text = upcycling.upcycle_checkpoint(source, source_format, output, config, changes,
                                                    arguments.with_optimizer)
    print(text, file=arguments.stream)
    return result
