"""Whether a checkpoint is large enough for a model, before anything is allocated for it."""

import pathlib

from switch_tf.training import checkpoint_folders


def check(config, checkpoint) -> None:
    """Refuses a configuration whose weights cannot lie in a checkpoint, as one of a stranger may be.

    Args:
        config: SwitchConfig.
        checkpoint: folder.

    Raises:
        ValueError: the model has more parameters than the checkpoint has bytes.
        BrokenCheckpoint: the checkpoint is not what its description says, or the description is damaged.
    """
    checkpoint = pathlib.Path(checkpoint)
    for path, variable in checkpoint_folders.describe(checkpoint)["variables"].items():
        if not _is_described(variable):
            raise checkpoint_folders.BrokenCheckpoint(
                f"{checkpoint} has no readable checkpoint.json (the shape of {path!r} is missing or damaged).")
    held = sum(file.stat().st_size for file in checkpoint.glob("state.data-*"))
    if config.num_parameters > held:
        raise ValueError(f"The configuration describes a model of {config.num_parameters:,} parameters, and the "
                         f"weights of {checkpoint} have {held:,} bytes, so they are of another model.")


def _is_described(variable):
    """Whether a variable has a shape and, where its dimensions are split for storage, parts that divide them."""
    if not isinstance(variable, dict) or not _is_of_integers(variable.get("shape")):
        return False
    left, split_off = list(variable["shape"]), variable.get("unfolded", [])
    for part in split_off if isinstance(split_off, list) else [None]:
        if not _is_of_integers(part) or len(part) != 2:
            return False
        dimension, size = part
        if dimension >= len(left) or not size or left[dimension] % size:
            return False
        left[dimension] //= size
    return True


def _is_of_integers(value):
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
