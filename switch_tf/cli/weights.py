"""`switch-tf convert`, `upcycle`, `average` and `shrink`: weights made from checkpoints."""

from argparse import ArgumentTypeError, Namespace

from etils import epy

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import CONFIGURATION
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
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

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf.surgery import shrinking, upcycling

CONVERT_EXAMPLES = r"""
switch-tf convert --input downloads/t5-small --output t5_small
switch-tf convert switch_base_8 --input checkpoint_500100 --output switch
"""
CONVERT_ARGUMENTS = (
    option("--input",
           "a Hugging Face folder (config.json and tensors), a checkpoint of T5X or Mesh TensorFlow (with the "
           "--gin_file of its model), a run folder or a checkpoint", "FOLDER", required=True),
    options.OUTPUT,
    option("--to",
           "what to write; by default switch_tf, or hugging_face if the input is switch_tf", one_of=WRITABLE),
    count("--expert_capacity", "to Hugging Face: slots of each expert for each sequence"),
    option("--dtype",
           "to Hugging Face: the tensors' dtype. bfloat16 keeps the bits of bfloat16 weights and rounds others",
           one_of=WRITTEN_DTYPES, default="float32"),
    option("--verify",
           "read the output and compare every weight with the input, and logits if two models fit into memory"),
    option("--with_optimizer",
           "of T5X and Mesh TensorFlow: also Adafactor's slots and its step, to go on with them"),
    *options.GIN,
)


def run_convert(arguments: Namespace) -> tuple[dict, str]:
    """Writes the output folder. Returns a description."""
    source, source_format = locate(arguments.input, "--input")
    to = WRITABLE[arguments.to or default_target(source_format).name]
    if arguments.expert_capacity and to is not HUGGING_FACE:
        raise Refusal("--expert_capacity is for --to=hugging_face alone.")
    if arguments.dtype != "float32" and to is not HUGGING_FACE:
        raise Refusal(f"--dtype={arguments.dtype} is for --to=hugging_face alone; weights are float32 in switch_tf.")
    has_model = arguments.gin_file or arguments.gin_bindings
    config = options.read_model(arguments)[0] if has_model else None
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return convert(source, output, to, arguments.expert_capacity, config, arguments.dtype, arguments.verify,
                       arguments.with_optimizer)


def _factor(text):
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number or auto, not {text!r}") from None


UPCYCLE_EXAMPLES = r"""
switch-tf upcycle switch_tiny --from runs/dense --output sparse
switch-tf upcycle switch_base_8 --from t5-base --output sparse --reinitialize=0.5
"""
UPCYCLE_ARGUMENTS = (
    option("--from", "a dense model: a run folder, a checkpoint, or one of Hugging Face, T5X or Mesh TensorFlow",
           "CHECKPOINT", dest="source", required=True),
    options.OUTPUT,
    option("--noise", "noise on each expert's kernels, relative to their standard deviation (default 0)",
           "STDDEV", type=float, default=0.0),
    option("--reinitialize",
           "share of each expert's hidden units to draw anew (default 0)", "SHARE", type=float, default=0.0),
    option("--gate_scale",
           "factor of the experts' output kernels, against gates that do not sum to one (default 1); auto for the "
           "one that keeps the size of each layer's output", "FACTOR", type=_factor, default=1.0),
    option("--with_optimizer",
           "copy Adafactor's state and its step, too; start with --gin.Run.initial_variables=\"'with_optimizer'\""),
    option("--seed", "of all draws (default 0)", type=int, default=0),
    *options.GIN,
)


def run_upcycle(arguments: Namespace) -> tuple[dict, str]:
    """Writes the sparse model. Returns a description."""
    changes = Changes(arguments.noise, arguments.reinitialize, arguments.gate_scale, arguments.seed)
    source, source_format = locate(arguments.source, "--from")
    if arguments.with_optimizer:
        check_optimizer(source, source_format, SWITCH_TF)
    config = options.read_model(arguments)[0]
    source = sources.checkpoint_in(source, source_format)
    sources.check_compatible(source_format.config_of(source) or sources.dense_twin(config), config)
    with options.new_output(arguments) as output:
        quiet.import_tensorflow()
        return upcycling.upcycle_checkpoint(source, source_format, output, config, changes, arguments.with_optimizer)


AVERAGE_EXAMPLES = r"""
switch-tf average --run runs/first --last 3 --output first_mean
switch-tf average --run runs/first --last 10 --output first_mean --json
"""
AVERAGE_ARGUMENTS = (
    option("--run", "a run folder", "FOLDER", required=True),
    count("--last", "number of its newest checkpoints", required=True, at_least=2),
    options.OUTPUT,
)


def run_average(arguments: Namespace) -> tuple[dict, str]:
    """Writes the mean. Returns the averaged steps."""
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
SHRINK_ARGUMENTS = (
    option("--from", "a run folder, for its newest checkpoint, or one of its checkpoints",
           "CHECKPOINT", dest="source", required=True),
    option("--num_experts", "experts that each layer keeps", "K", required=True, type=int),
    options.OUTPUT,
    option("--merge", "merge the most similar experts; by default the most used ones are kept"),
    options.TRUST,
    *options.GIN,
)


def run_shrink(arguments: Namespace) -> tuple[dict, str]:
    """Writes the smaller model. Returns the losses and the remaining experts."""
    source = places.at(arguments.source)
    folder = folders.run_folder_of(source)
    if not (folder / CONFIGURATION).is_file() or not (folder / "checkpoints").is_dir():
        raise Refusal("--from must be a run folder or one of its checkpoints, because the use of experts is measured "
                      f"on the task of the run; {str(source)!r} is neither.")
    checkpoint = sources.checkpoint_in(source, SWITCH_TF)
    sources.reduce_experts(model_gin.recorded(checkpoint), arguments.num_experts)
    with options.new_output(arguments) as output:
        described = options.load_run(arguments, folder, on_one_device=True)
        return shrinking.shrink_checkpoint(checkpoint, output, described, arguments.num_experts, arguments.merge)
