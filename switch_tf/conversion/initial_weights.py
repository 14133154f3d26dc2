"""Weights of another format that a run reads: those that it starts from, and those of a teacher."""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, stated_config
from switch_tf.conversion.formats import Format
from switch_tf.refusals import Refusal


@contextlib.contextmanager
def converted(run: Run, config: SwitchConfig) -> Iterator[pathlib.Path | None]:
    """Yields a checkpoint of the weights of a new run if INITIAL_CHECKPOINT is of another format, else None.

    The checkpoint is gone at the end of the scope.

    Args:
        run: Run.
        config: Configuration of its model, for a format that does not describe it.
    """
    folder, found = run.initial_checkpoint, None
    if folder is not None and not folders.steps(RunFolder.checkpoints_of(run.model_dir)):
        folder, found = formats.locate(folder)
    if found in (None, formats.SWITCH_TF):
        yield None
        return
    if run.initial_variables == "with_optimizer":
        raise Refusal(f"Run.initial_variables is 'with_optimizer', and INITIAL_CHECKPOINT {folder} is of "
                      f"{found.name}; convert it with switch-tf convert --with_optimizer, and start from the output.")
    if run.initial_variables == "matching":  # of another model
        config = stated_config.find(folder, found) or config
    with as_checkpoint(folder, found, config) as weights:
        yield weights


@contextlib.contextmanager
def as_checkpoint(folder: str | pathlib.Path, source_format: Format, config: SwitchConfig) -> Iterator[pathlib.Path]:
    """Yields a checkpoint with the weights of a folder of another format, to be read into any layout.

    The checkpoint is gone at the end of the scope.

    Args:
        folder: Folder of the weights.
        source_format: Its Format.
        config: Configuration of its model, for a format that does not describe it.
    """
    print(f"Reading the weights of {folder} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary, source_format.at_hand(folder) as local:
        weights = pathlib.Path(temporary) / "weights"
        formats.SWITCH_TF.write(source_format.open(local, config), weights, formats.Extras())
        yield weights
