"""`switch-tf export`: writes a trained model as a SavedModel, texts in and out, which TensorFlow loads by itself."""

import argparse
import importlib
import pathlib

from etils import epy

from switch_tf.checkpoints.run_folder import select_one
from switch_tf.cli import options
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal
from switch_tf.storage import places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.inference import exporting

EXAMPLES = r"""
switch-tf export --run runs/first --output exported
switch-tf export --run runs/first --step best --sampler beam --num_beams 4 --output exported_beam
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run and its checkpoint or the model, the output, the sampler and the gin arguments."""
    options.add_decoding_arguments(parser, answers=False)
    parser.add_argument("--model", metavar="FILE", help="in place of --run: a model that Keras saved, model.keras")
    parser.add_argument("--vocabulary", metavar="NAME_OR_FILE",
                        help="with --model: a vocabulary, for text in and text out; without it ids in and out")
    parser.add_argument("--inputs_length", at_least=1,
                        help="with --model and --vocabulary: tokens of a text to read at most (default 512)")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Writes the folder; returns what was exported."""
    options.check_decoding(arguments)
    _check_source(arguments)
    if arguments.num_results not in (None, 1):
        raise Refusal("An exported model gives the best result; leave out --num_results.")
    checkpoint = None
    if arguments.model is None:
        folder = options.folder_of(arguments)
        checkpoint = select_one(folder, arguments.step)
    with options.new_output(arguments) as output:
        if checkpoint is None:
            quiet.import_tensorflow()
            importlib.import_module("switch_tf.tasks")  # declares the names that --vocabulary takes
            model = exporting.load(arguments.model)
            print(f"Writing {arguments.model} as a SavedModel.", flush=True)
            exporting.export(model, output, arguments.vocabulary, arguments.max_length or 64,
                             options.sampler_of(arguments), arguments.inputs_length or 512,
                             {"model": pathlib.Path(arguments.model).name})
            result = {"model": arguments.model}
        else:
            task, text_model, identity = options.load_text_model(arguments, folder, checkpoint, batch_size=1)
            print(f"Writing step {identity['step']} of {folder} as a SavedModel.", flush=True)
            exporting.export_texts(text_model, output, {"run": folder.resolve().name, "task": task, **identity})
            result = {"run": str(folder), "step": identity["step"]}
    size = places.tree_size(output)
    return ({**result, "output": str(output), "bytes": size},
            f"{output}: {size / 1e6:.1f} MB; {exporting.CARD} in it shows how to call it.")


def _check_source(arguments):
    """Refuses both or none of a run and a model, and arguments of the other one."""
    if (arguments.run is None) == (arguments.model is None):
        raise Refusal("Give either --run FOLDER (trained by switch-tf train) or --model FILE (saved by Keras).")
    if arguments.model is None:
        for name in ("vocabulary", "inputs_length"):
            if getattr(arguments, name) is not None:
                raise Refusal(f"--{name} goes with --model; a run has its own.")
        return
    if arguments.gin_file or arguments.gin_bindings or arguments.step != "last":
        raise Refusal("--step and gin arguments go with --run; a saved model has its own configuration.")
    for name, why in (("raw", "the texts of a saved model are always read as they are"),
                      ("trust", "a saved model has no gin file")):
        if getattr(arguments, name):
            raise Refusal(f"--{name} goes with --run; {why}.")
    if not places.at(arguments.model).is_file():
        raise Refusal(f"--model must name a file that Keras saved, such as model.keras, not {arguments.model!r}.")
    if arguments.inputs_length is not None and arguments.vocabulary is None:
        raise Refusal("--inputs_length goes with --vocabulary; ids are read whole.")
