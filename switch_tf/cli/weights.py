"""`switch-tf convert`, `upcycle`, `average` and `shrink`: write weights that are made from a checkpoint."""

import argparse

from etils import epy

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli import options
from switch_tf.configs.choices import check_choice
from switch_tf.conversion import model_gin
from switch_tf.conversion.checkpoint_files import WRITTEN_DTYPES
from switch_tf.conversion.formats import (
    HUGGING_FACE,
    SWITCH_TF,
    WRITABLE,
    check_optimizer,
    convert,
    default_target,
    locate,
)
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.surgery import sources
from switch_tf.surgery.kernels import Changes

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.surgery import shrinking, upcycling

CONVERT_EXAMPLES = r"""
switch-tf convert --input downloads/t5-small --output t5_small
switch-tf convert --input checkpoint_500100 --output switch --gin_file=gin/models/switch_base_8.gin
"""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two folders and the gin arguments."""
    parser.add_argument("--input", required=True, metavar="FOLDER",
                        help="a Hugging Face folder (config.json and tensors), a checkpoint of T5X or Mesh TensorFlow "
                             "(with the --gin_file of its model), a run folder or a checkpoint")
    options.add_output(parser)
    parser.add_argument("--to", metavar="|".join(WRITABLE),
                        help="what to write; by default switch_tf, or hugging_face if the input is switch_tf")
    parser.add_argument("--expert_capacity", at_least=1,
                        help="to Hugging Face: slots of each expert for each sequence")
    parser.add_argument("--dtype", default="float32", metavar="|".join(WRITTEN_DTYPES),
                        help="to Hugging Face: the tensors' dtype. bfloat16 keeps the bits of bfloat16 weights and "
                             "rounds others")
    parser.add_argument("--verify", action="store_true",
                        help="read the output and compare every weight with the input, and logits if two models fit "
                             "into memory")
    parser.add_argument("--with_optimizer", action="store_true",
                        help="of T5X and Mesh TensorFlow: also Adafactor's slots and its step, to go on with them")
    options.add_gin_arguments(parser)


def run_convert(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the output folder; returns what was converted."""
    source, source_format = locate(arguments.input, "--input")
    name = arguments.to or default_target(source_format).name
    check_choice("--to", name, WRITABLE)
    to = WRITABLE[name]
    if arguments.expert_capacity is not None and to is not HUGGING_FACE:
        raise Refusal("--expert_capacity is for --to=hugging_face alone.")
    check_choice("--dtype", arguments.dtype, WRITTEN_DTYPES)
    if arguments.dtype != "float32" and to is not HUGGING_FACE:
        raise Refusal(f"--dtype={arguments.dtype} is for --to=hugging_face alone; weights are float32 in switch_tf.")
    config = None
    if arguments.gin_file or arguments.gin_bindings:
        config = options.read_model(arguments)[0]
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return convert(source, output, to, arguments.expert_capacity, config, arguments.dtype, arguments.verify,
                       arguments.with_optimizer)


UPCYCLE_EXAMPLES = r"""
switch-tf upcycle --from runs/dense --gin_file=gin/models/switch_tiny.gin --output sparse
switch-tf upcycle --from t5-base --gin_file=gin/models/switch_base_8.gin --output sparse --reinitialize=0.5
"""


def add_upcycle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two folders, the differences between experts, and the gin arguments of the sparse model."""
    parser.add_argument("--from", dest="source", required=True, metavar="CHECKPOINT",
                        help="a dense model: a run folder, a checkpoint, or one of Hugging Face, T5X or Mesh "
                             "TensorFlow")
    options.add_output(parser)
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
    options.add_gin_arguments(parser)


def _factor(text):
    """Returns "auto" or a number. argparse shows the error."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, not {text!r}") from None


def run_upcycle(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the sparse model; returns what it is made of."""
    changes = Changes(arguments.noise, arguments.reinitialize, arguments.gate_scale, arguments.seed)
    source, source_format = locate(arguments.source, "--from")
    if arguments.with_optimizer:
        check_optimizer(source, source_format, SWITCH_TF)
    config = options.read_model(arguments)[0]
    source = sources.checkpoint_in(source, source_format)
    dense = source_format.config_of(source)
    sources.check_compatible(sources.dense_twin(config) if dense is None else dense, config)
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return upcycling.upcycle_checkpoint(source, source_format, output, config, changes, arguments.with_optimizer)


AVERAGE_EXAMPLES = r"""
switch-tf average --run runs/first --last 3 --output first_mean
switch-tf average --run runs/first --last 10 --output first_mean --json
"""


def add_average_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, the number of its checkpoints, and the output."""
    parser.add_argument("--run", required=True, metavar="FOLDER", help="a run folder")
    parser.add_argument("--last", required=True, at_least=2,
                        help="number of its newest checkpoints")
    options.add_output(parser)


def run_average(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the mean; returns the steps that it is of."""
    folder = places.at(arguments.run)
    checkpoints = sources.newest(folder, arguments.last)
    sources.check_same(checkpoints)
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return upcycling.average_run(folder, checkpoints, output)


SHRINK_EXAMPLES = r"""
switch-tf shrink --from runs/first --num_experts=4 --output small
switch-tf shrink --from runs/first/checkpoints/step_00000300 --num_experts=4 --output small --merge
"""


def add_shrink_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the checkpoint, the output, how experts become fewer, and the gin arguments of the run."""
    parser.add_argument("--from", dest="source", required=True, metavar="CHECKPOINT",
                        help="a run folder, for its newest checkpoint, or one of its checkpoints")
    parser.add_argument("--num_experts", required=True, type=int, metavar="K", help="experts that each layer keeps")
    options.add_output(parser)
    parser.add_argument("--merge", action="store_true",
                        help="merge the most similar experts; by default the most used ones are kept")
    options.add_trust(parser)
    options.add_gin_arguments(parser)


def run_shrink(arguments: argparse.Namespace) -> tuple[dict, str]:
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
