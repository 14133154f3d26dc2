"""`switch-tf export`: a trained model as a SavedModel, texts in and out, which TensorFlow loads by itself."""

import pathlib
import sys

from switch_tf import checks
from switch_tf.cli import outputs, sampler_arguments, trained_run
from switch_tf.cli.main import Mistake
from switch_tf.messages import first_line
from switch_tf.training import checkpoint_folders

EXAMPLES = r"""
switch-tf export --run runs/first --output exported
switch-tf export --run runs/first --step best --sampler beam --num_beams 4 --output exported_beam
"""


def add_arguments(parser) -> None:
    """Declares the run, its checkpoint, the folder, the sampler and the gin arguments."""
    trained_run.add_arguments(parser)
    trained_run.add_checkpoint_argument(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    trained_run.add_raw_argument(parser)
    sampler_arguments.add_arguments(parser)


def run(arguments) -> dict:
    """Writes the folder; what was exported is the JSON object."""
    sampler_arguments.check(arguments)
    if arguments.num_results not in (None, 1):
        raise Mistake("An exported model gives the best result; leave out --num_results.")
    try:
        output = checks.path("--output", arguments.output)
        checks.new_folder(output)
    except (ValueError, OSError) as error:
        raise Mistake(first_line(error)) from error
    folder = trained_run.folder_of(arguments)
    checkpoint = trained_run.one_checkpoint(arguments, folder)
    with outputs.locked(output):
        described = trained_run.load_on_one_device(arguments, folder)
        try:
            return _export(arguments, folder, checkpoint, described, output)
        except (ValueError, OSError, checkpoint_folders.BrokenCheckpoint) as error:
            raise Mistake(first_line(error)) from error


def _export(arguments, folder, checkpoint, described, output):
    from switch_tf.inference import exporting

    stream = sys.stderr if arguments.json else sys.stdout
    text_model, identity = trained_run.load_text_model(described, checkpoint, arguments.max_length,
                                                       sampler_arguments.sampler(arguments), is_raw=arguments.raw)
    print(f"Writing step {identity['step']} of {folder} as a SavedModel.", file=stream, flush=True)
    about = {"run": folder.resolve().name, "task": described.run.mixture_or_task_name, **identity}
    exporting.export(text_model, output, about)
    size = sum(file.stat().st_size for file in pathlib.Path(output).rglob("*") if file.is_file())
    print(f"{output}: {size / 1e6:.1f} MB; {exporting.CARD} in it says how it is called.", file=stream)
    return {"run": str(folder), "step": identity["step"], "output": str(output), "bytes": size}
