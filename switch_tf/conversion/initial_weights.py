"""Weights of another format that a new run starts from."""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.refusals import Refusal


@contextlib.contextmanager
def converted(run: Run, config: SwitchConfig) -> Iterator[pathlib.Path | None]:
    """Yields a checkpoint of the weights of a new run if INITIAL_CHECKPOINT is of another format, else None.

    The checkpoint is gone at the end of the scope.

    Args:
        run: Run.
        config: Configuration of its model, for a format that does not describe it.
    """
    folder = run.initial_checkpoint
    is_new = not folders.steps(RunFolder.checkpoints_of(run.model_dir))
    found = formats.find(folder) if folder is not None and is_new else None
    if found in (None, formats.SWITCH_TF):
        yield None
        return
    if run.initial_variables == "with_optimizer":
        raise Refusal(f"Run.initial_variables is 'with_optimizer', and INITIAL_CHECKPOINT {folder} is of "
                      f"{found.name}; convert it with switch-tf convert --with_optimizer, and start from the output.")
    print(f"Reading the weights of {folder} ...", file=sys.stderr)
    # Through a file, because a checkpoint's variables are read into any layout.
    with tempfile.TemporaryDirectory() as temporary, found.at_hand(folder) as local:
        weights = pathlib.Path(temporary) / "weights"
        formats.SWITCH_TF.write(found.open(local, config), weights, formats.Extras())
        yield weights
