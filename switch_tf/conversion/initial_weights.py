"""Weights of another format that a run reads: those that it starts from, and those of a teacher."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras

from switch_tf.checkpoints import continuation, folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.partitioning.variables import PjrtVariable, assign, stored, unfolding_of
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress


class Opened:
    """Opened weights of any format, which `tensors.start` reads into any layout: each process its own pieces.

    Args:
        source: WeightSource.
        path: Where it is, for messages.

    Attributes:
        description: Step, configuration and variables as `folders.describe` returns them.
    """

    def __init__(self, source: WeightSource, path: Any):
        self.source, self.path = source, path
        self.description = {"step": 0, "configuration": continuation.record_of(source.config), "variables": {
            f"{folders.MODEL}{name}": {"shape": list(weight.shape)} for name, weight in source.weights.items()}}

    def fill(self, variables: dict[str, keras.Variable]) -> None:
        """Reads variables, one at a time.

        Raises:
            Refusal: A weight cannot be read, or is not finite.
        """
        sizes = {path: 4 * math.prod(variable.shape) for path, variable in variables.items()}
        with progress.bar(sum(sizes.values()), "reading weights") as bar:
            for path, variable in variables.items():
                self._fill(path.removeprefix(folders.MODEL), variable)
                bar.update(sizes[path])

    def _fill(self, name, variable):
        held = stored(variable)
        if not isinstance(held, PjrtVariable) or unfolding_of(variable).first or not variable.shape:
            assign(variable, self.source.read(name, slice(None)))
            return

        def piece(index):
            rows, *others = index
            return self.source.read(name, slice(*rows.indices(variable.shape[0])))[(slice(None), *others)]

        held.load(piece)


@contextlib.contextmanager
def opened(run: Run, config: SwitchConfig) -> Iterator["Opened | None"]:
    """Yields the weights of a new run if INITIAL_CHECKPOINT is of another format, else None.

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
        config = found.config_of(folder) or config
    with found.at_hand(folder) as local:
        yield Opened(found.module.open_weights(local, config), folder)
