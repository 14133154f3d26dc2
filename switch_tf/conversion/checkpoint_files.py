"""Tensor files of a Hugging Face folder, opened without reading a tensor."""

import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from switch_tf import checks
from switch_tf.conversion import json_files, pytorch_bin, safetensors_file
from switch_tf.refusals import Refusal

_MAX_NAME = 300  # characters of a tensor's name; T5's have about 60
_FLOATS = ("F32", "F16", "BF16", "float32", "float16", "bfloat16")


class Tensor(NamedTuple):
    """A tensor in a file, read on demand.

    `load` returns all of it, which takes no memory before it is used if the file is mapped. `load_part(index)` returns
    a part of one that is larger than a part, None if `load` does no more than that.
    """

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    load_part: Callable[[tuple], np.ndarray] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, index: tuple = ()) -> np.ndarray:
        """Returns the values at an index, () for all, as <float32>, exact for every accepted dtype."""
        if index and self.load_part is not None:
            return np.asarray(self.load_part(index), np.float32)
        return np.asarray(self.load()[index], np.float32)


def open_folder(folder: pathlib.Path) -> dict[str, Tensor]:
    """Opens model.safetensors or pytorch_model.bin of a folder, one file or shards. Returns name -> tensor.

    Raises:
        Refusal: the folder has neither, a file is incomplete or damaged, or a tensor is not float16, bfloat16 or
            float32.
    """
    for file_name, open_file in (("model.safetensors", safetensors_file.open_tensors),
                                 ("pytorch_model.bin", pytorch_bin.open_tensors)):
        index = folder / f"{file_name}.index.json"
        if _is_there(folder / file_name):
            json_files.check_regular(folder / file_name)
            return _weights(open_file(folder / file_name))
        if _is_there(index):
            return _weights(_open_shards(index, open_file))
    names = sorted(path.name for path in folder.iterdir())
    raise Refusal(f"{folder} holds neither model.safetensors nor pytorch_model.bin (nor the index of their shards), "
                  f"but {checks.shown(names)}; download one of them into it.")


def has_tensors(folder: pathlib.Path) -> bool:
    """Returns whether `folder` holds a file that `open_folder` opens, or the index of its shards."""
    return any(_is_there(folder / f"{name}{end}") for name in ("model.safetensors", "pytorch_model.bin")
               for end in ("", ".index.json"))


def _is_there(path):
    return path.exists() or path.is_symlink()


def _weights(stored) -> dict[str, Tensor]:
    """Checks names and dtypes before any values are read."""
    for name, tensor in stored.items():
        if len(name) > _MAX_NAME:
            raise Refusal(f"The checkpoint has a tensor whose name has {len(name)} characters, "
                          f"{checks.shown(name)}; no model has such names.")
        if tensor.dtype not in _FLOATS:
            raise Refusal(f"A weight must be float32, float16 or bfloat16, but {name!r} is "
                          f"{checks.shown(tensor.dtype)}; save the checkpoint anew in one of them, or take the "
                          "original of a quantised one.")
    return {name: Tensor(tensor.shape, tensor.load) for name, tensor in stored.items()}


def _open_shards(index, open_file):
    weight_map = json_files.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Refusal(f"{index} has no \"weight_map\" that says which file holds which tensor; download it again.")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not _is_file_name(shard) or not (index.parent / shard).is_file():
            raise Refusal(f"{index.name} names the file {checks.shown(shard)}, which is not in {index.parent}; "
                          "download it too.")
        json_files.check_regular(index.parent / shard)
        shards[shard] = open_file(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise Refusal(f"{index.name} says that {shard} holds {checks.shown(name)}, but it does not; download "
                          "both again.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _is_file_name(name):
    """Returns whether `name` is a plain file name, not a path that could lead out of the folder."""
    return 0 < len(name.encode("utf-8", "replace")) <= 255 and not {"/", "\\", "\0"} & set(name) and name != ".."
