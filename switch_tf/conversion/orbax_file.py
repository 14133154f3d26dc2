"""The description `_METADATA` of an Orbax checkpoint, as T5X writes it in `checkpoint_<step>/state`.

A JSON object: `tree_metadata` has the keys of each array, such as "target", "encoder", "encoder_norm", "scale". The
array is in zarr format under the keys joined by dots, in a folder or in the OCDBT database of the checkpoint.
"""

import pathlib
from typing import Any

from switch_tf import checks
from switch_tf.conversion import json_files
from switch_tf.conversion.t5x_file import PARTS, Reference, reference_to
from switch_tf.refusals import Refusal

FILE = "_METADATA"
DATABASE = "manifest.ocdbt"
_ITEMS = ("state", "default", "items")  # T5X's name, and those of Orbax' checkpoint managers


def root_of(folder: Any) -> Any | None:
    """Returns the folder of the description: a checkpoint, which may be in a bucket, or an item in it; else None."""
    return next((root for root in (folder, *(folder / item for item in _ITEMS)) if (root / FILE).is_file()), None)


def read_leaves(root: pathlib.Path, part: str = "target") -> tuple[dict[str, Reference], str]:
    """Returns the leaves of a part, name -> place of the array, and the tensorstore driver that reads them.

    Args:
        root: From `root_of`.
        part: "target", the weights, or "state", the optimizer's state.

    Raises:
        Refusal: the file is damaged, or holds something else.
    """
    content = json_files.read_object(root / FILE)
    entries = content.get("tree_metadata")
    entries = [entry for entry in entries.values() if not _is_none(entry)] if isinstance(entries, dict) else [entries]
    try:
        leaves = {"/".join(keys): reference_to(".".join(keys)) for keys in map(_keys, entries)
                  if keys[0] == part}
    except Refusal as error:
        raise Refusal(f"{root / FILE} is damaged: {error}; download it again.") from None
    if not leaves:
        raise Refusal(f"{root / FILE} must describe {PARTS[part]} under \"{part}\", as T5X's checkpoints do, and "
                      "describes none.")
    return leaves, "zarr3" if content.get("use_zarr3") else "zarr"


def _is_none(entry):
    """Returns whether an entry stands for no array: the slots of a weight that the optimizer does not train."""
    metadata = entry.get("value_metadata") if isinstance(entry, dict) else None
    return isinstance(metadata, dict) and metadata.get("value_type") == "None"


def _keys(entry):
    try:
        keys = [part["key"] for part in entry["key_metadata"]]
        is_valid = bool(keys) and all(isinstance(key, str) for key in keys)
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise Refusal(f"an array has no keys, but {checks.shown(entry)}")
    return keys
