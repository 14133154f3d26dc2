"""Weights of another format that a run reads: those that it starts from, and those of a teacher."""

from typing import Any

import keras

from switch_tf.checkpoints import continuation, folders
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.conversion.weight_source import WeightSource, fill
from switch_tf.refusals import Refusal


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
        """Reads variables by their paths, see `weight_source.fill`."""
        fill(self.source, {path.removeprefix(folders.MODEL): variable for path, variable in variables.items()})


def opened(run: Run, config: SwitchConfig) -> Opened | None:
    """Returns the weights of a new run if INITIAL_CHECKPOINT is of another format, else None.

    Args:
        run: Run.
        config: Configuration of its model, for a format that does not describe it.
    """
    folder, found = run.initial_checkpoint, None
    if folder is not None and not folders.steps(folders.checkpoints_of(run.model_dir)):
        folder, found = formats.locate(folder)
    if found in (None, formats.SWITCH_TF):
        return None
    if run.initial_variables == "with_optimizer":
        raise Refusal(f"Run.initial_variables is 'with_optimizer', and INITIAL_CHECKPOINT {folder} is of "
                      f"{found.name}; convert it with switch-tf convert --with_optimizer, and start from the output.")
    if run.initial_variables == "matching":  # of another model
        config = found.config_of(folder) or config
    return Opened(found.module.open_weights(folder, config), folder)
