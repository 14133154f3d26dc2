"""`switch-tf convert`: converts weights of other software into a checkpoint to start from, and others back."""

import argparse

from switch_tf import checks
from switch_tf.cli import gin_files
from switch_tf.configs.choices import check_choice
from switch_tf.conversion.checkpoint_files import WRITTEN_DTYPES
from switch_tf.conversion.converting import convert, default_target
from switch_tf.conversion.formats import WRITABLE, locate
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

EXAMPLES = r"""
switch-tf convert --input downloads/t5-small --output t5_small
switch-tf convert --input checkpoint_500100 --output switch --gin_file=gin/models/switch_base_8.gin
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two folders and the gin arguments."""
    parser.add_argument("--input", required=True, metavar="FOLDER",
                        help="a Hugging Face folder (config.json and tensors), a checkpoint of T5X or Mesh TensorFlow "
                             "(with the --gin_file of its model), a run folder or a checkpoint")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--to", metavar="|".join(WRITABLE),
                        help="what to write; by default switch_tf, or hugging_face if the input is switch_tf")
    parser.add_argument("--expert_capacity", type=int, at_least=1, metavar="N",
                        help="to Hugging Face: slots of each expert for each sequence")
    parser.add_argument("--dtype", default="float32", metavar="|".join(WRITTEN_DTYPES),
                        help="to Hugging Face: the tensors' dtype. bfloat16 keeps the bits of bfloat16 weights and "
                             "rounds others")
    parser.add_argument("--verify", action="store_true",
                        help="read the output and compare every weight with the input, and logits if two models fit "
                             "into memory")
    parser.add_argument("--with_optimizer", action="store_true",
                        help="of T5X and Mesh TensorFlow: also Adafactor's slots and its step, to go on with them")
    gin_files.add_arguments(parser)


def run(arguments: argparse.Namespace) -> dict:
    """Writes the output folder; returns what was converted."""
    source, output = places.at(arguments.input), places.at(arguments.output)
    source, source_format = locate(source, "--input")
    name = arguments.to or default_target(source_format).name
    check_choice("--to", name, WRITABLE)
    to = WRITABLE[name]
    if arguments.expert_capacity is not None and "expert_capacity" not in to.options:
        raise Refusal("--expert_capacity is for --to=hugging_face alone.")
    check_choice("--dtype", arguments.dtype, WRITTEN_DTYPES)
    if arguments.dtype != "float32" and "dtype" not in to.options:
        raise Refusal(f"--dtype={arguments.dtype} is for --to=hugging_face alone; weights are float32 in switch_tf.")
    checks.new_folder(output)
    config = None
    if arguments.gin_file or arguments.gin_bindings:
        config = gin_files.read_model(arguments)[0]
    with lock.held(output):
        quiet.import_tensorflow()
        result, text = convert(source, output, to, arguments.expert_capacity, config, arguments.dtype,
                               arguments.verify, arguments.with_optimizer)
    print(text, file=arguments.stream)
    return result
