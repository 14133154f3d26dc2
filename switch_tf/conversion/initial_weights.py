"""Weights of Hugging Face that a new run starts from."""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from switch_tf import conversion
from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.storage import places


@contextlib.contextmanager
def converted(run: Run) -> Iterator[pathlib.Path | None]:
    """Yields a checkpoint of the weights of a new run if INITIAL_CHECKPOINT is Hugging Face's, else None.

    The checkpoint is gone at the end of the scope.
    """
    folder = run.initial_checkpoint
    is_new = not folders.steps(RunFolder.checkpoints_of(run.model_dir))
    if folder is None or not is_new or not run_config.is_hugging_face(folder):
        yield None
        return
    print(f"Reading the weights of {folder} ...", file=sys.stderr)
    # Through a file, because a checkpoint's variables are read into any layout.
    with tempfile.TemporaryDirectory() as temporary, places.fetched(folder) as local:
        conversion.to_switch_tf(conversion.from_hugging_face(local), pathlib.Path(temporary) / "weights")
        yield pathlib.Path(temporary) / "weights"
