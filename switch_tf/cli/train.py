"""`switch-tf train`: gin files in, a run folder out."""

import contextlib
import datetime
import os
import pathlib
import shlex
import sys
import tempfile

from switch_tf.cli import gin_files, gin_run, processes
from switch_tf.cli.main import Mistake
from switch_tf.cli.stopping import Stopping
from switch_tf.messages import first_line
from switch_tf.training import checkpoint_folders
from switch_tf.training.run_folder import RunFolder


def add_arguments(parser) -> None:
    """Declares the gin arguments, `--devices` and `--processes`."""
    gin_files.add_arguments(parser)
    processes.add_arguments(parser)


def run(arguments) -> dict:
    """Trains to the last step or until interrupted; the summary of the run is the JSON object."""
    if arguments.processes != 1:
        gin_run.look(arguments.gin_file, arguments.gin_bindings, arguments.gin_search_paths)
        return {"exit_status": processes.run(arguments.words, arguments.processes, arguments.devices)}
    gin_run.load(arguments, num_cpu_devices=processes.devices_of_this_process(arguments.devices))
    training = _start(arguments.words)

    import tensorflow as tf

    from switch_tf.data import FailedMetric
    from switch_tf.partitioning.partitioner import is_lost_process
    from switch_tf.training import checkpoints, diagnosis, examples_shown
    from switch_tf.training.best import UnknownMetric
    try:
        with training, Stopping(training.progress.say) as stopping:
            training.advance(training.run.train_steps, lambda: stopping.reason)
            summary = training.finish()
            shown = ""
            if training.run.shown_examples and not summary["interrupted"]:
                predictions = examples_shown.predict(training.state.model, training.run, training.partitioner)
                shown = examples_shown.describe(predictions)
    except (diagnosis.Divergence, checkpoints.BrokenCheckpoint, FailedMetric, UnknownMetric,
            OSError) as error:
        raise Mistake(str(error)) from error
    except tf.errors.OpError as error:
        if training.partitioner.num_processes == 1 or not is_lost_process(error):
            raise
        print(f"switch-tf train: {training.lost_process(str(error))}", file=sys.stderr, flush=True)
        os._exit(2)  # what TensorFlow would wait for at the end is gone
    exit_status = processes.INTERRUPTED if summary["interrupted"] else 0
    if not training.partitioner.is_chief:
        return {"exit_status": exit_status}
    print("\n\n".join(filter(None, [shown, describe(summary)])), file=sys.stderr if arguments.json else sys.stdout)
    return {**summary, "exit_status": exit_status}


def _start(words):
    """Starts the run that gin describes; what is wrong with it is the user's, and one sentence."""
    import gin

    from switch_tf.training import checkpoints
    from switch_tf.training.trainer import Trainer
    described = gin_run.on_this_machine()
    try:
        with _converted(described.run) as weights:
            trainer = gin.get_configurable(Trainer)(partitioner=described.partitioner, initial_weights=weights)
            return trainer.start(_origin(words, trainer.model.config) + gin.operative_config_str())
    except (ValueError, OSError, checkpoints.BrokenCheckpoint) as error:
        raise Mistake(first_line(error)) from error


@contextlib.contextmanager
def _converted(run):
    """A checkpoint of the weights that a new run starts from where those are Hugging Face's, while the scope lasts."""
    folder = pathlib.Path(run.initial_checkpoint or "")
    is_new = not checkpoint_folders.steps(RunFolder.checkpoints_of(run.model_dir))
    if run.initial_checkpoint is None or not is_new or not (folder / "config.json").is_file():
        yield None
        return
    from switch_tf import conversion
    print(f"Reading the weights of {folder} ...", file=sys.stderr)
    # Through a file, because a checkpoint's variables are read into any layout.
    with tempfile.TemporaryDirectory() as temporary:
        conversion.to_switch_tf(conversion.from_hugging_face(folder), pathlib.Path(temporary) / "weights")
        yield pathlib.Path(temporary) / "weights"


def _origin(words, config):
    """Comments before a configuration: what a reader of the run folder will ask."""
    import keras
    import tensorflow as tf

    import switch_tf
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")


def describe(summary) -> str:
    """The end of a run in a few lines."""
    from switch_tf.training import report
    lines = [f"Step {summary['step']}."]
    for name, value in summary.items():
        if isinstance(value, dict):
            share = f" (the last {value['last'] / value['first']:.0%} of the first)" if name.endswith("/loss") else ""
            lines.append(f"{name}: {report.describe(value)}{share}")
        elif name.startswith("eval/"):
            lines.append(f"{name}: {value:.4f}, a model that knows only how frequent each token is")
    if "train/tokens_per_second" in summary:
        lines.append(f"{summary['train/tokens_per_second']:,.0f} tokens/s (median)")
    return "\n".join([*lines, f"Report: {summary['report']}", f"Plot:   {summary['plot']}"])
