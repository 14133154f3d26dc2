"""What commands that start runs share: weights from elsewhere, and where a configuration is from."""

import contextlib
import datetime
import pathlib
import shlex
import sys
import tempfile

from switch_tf.training import checkpoint_folders
from switch_tf.training.run_folder import RunFolder


@contextlib.contextmanager
def converted(run):
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


def origin(words: list[str], config) -> str:
    """Comments before a configuration: what a reader of the run folder will ask."""
    import keras
    import tensorflow as tf

    import switch_tf
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")
