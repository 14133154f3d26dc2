"""Whether a checkpoint is large enough for a model, before anything is allocated for it."""

import pathlib

from switch_tf.checkpoints import folders
from switch_tf.refusals import Refusal


def check(config, checkpoint) -> None:
    """Refuses a configuration whose weights cannot lie in a checkpoint, as one of a stranger may be.

    Args:
        config: SwitchConfig.
        checkpoint: folder.

    Raises:
        Refusal: the model has more parameters than the checkpoint has bytes.
        BrokenCheckpoint: the checkpoint is not what its description says, or the description is damaged.
    """
    checkpoint = pathlib.Path(checkpoint)
    folders.describe(checkpoint)
    held = sum(file.stat().st_size for file in checkpoint.glob("state.data-*"))
    if config.num_parameters > held:
        raise Refusal(f"The configuration describes a model of {config.num_parameters:,} parameters, and the "
                      f"weights of {checkpoint} have {held:,} bytes, so they are of another model.")
