"""Sizes of a checkpoint, read before anything is allocated for it."""

import math

from switch_tf.checkpoints import folders
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal
from switch_tf.storage import places


def check(config: SwitchConfig, checkpoint: folders.Folder) -> None:
    """Checks that a checkpoint, which may come from a stranger, is large enough for the weights of a model.

    Args:
        config: SwitchConfig.
        checkpoint: path of the checkpoint folder.

    Raises:
        Refusal: the model has more parameters than the checkpoint has bytes.
        BrokenCheckpoint: the checkpoint disagrees with its description, or the description is damaged.
    """
    checkpoint = places.at(checkpoint)
    folders.describe(checkpoint)
    held = sum(file.stat().st_size for file in checkpoint.glob("state.data-*"))
    if config.num_parameters > held:
        raise Refusal(f"The configuration describes a model of {config.num_parameters:,} parameters, and the "
                      f"weights of {checkpoint} have {held:,} bytes, so they are of another model.")


def summary(checkpoint: folders.Folder) -> dict:
    """Returns the `step`, `num_parameters` and `bytes` of a checkpoint folder.

    The bytes are of "weights" and "optimizer" as float32, whatever their dtype, and of all files, "on_disk".

    Raises:
        BrokenCheckpoint: The checkpoint disagrees with its description, or the description is damaged.
        Refusal: The format has another version.
    """
    description = folders.describe(checkpoint)
    sizes = {"model": 0, "optimizer": 0}
    for path, variable in description["variables"].items():
        sizes[path.partition("/")[0]] += math.prod(variable["shape"])
    return {"step": description["step"], "num_parameters": sizes["model"],
            "bytes": {"weights": 4 * sizes["model"], "optimizer": 4 * sizes["optimizer"],
                      "on_disk": sum(entry["size"] for entry in description["files"].values())}}
