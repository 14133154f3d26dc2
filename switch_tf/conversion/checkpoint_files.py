"""The tensor files of a Hugging Face folder: opened without reading a tensor, written one tensor at a time."""

import functools
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from switch_tf.conversion import pytorch_bin

MAX_SHARD_BYTES = 5 * 10**9
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Tensor(NamedTuple):
    """A tensor that is read when it is asked for."""

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        """<float32>[*shape], exact for every dtype that is accepted."""
        array = self.load()
        if array.dtype not in _FLOATS:
            raise ValueError(f"A weight must be float32, float16 or bfloat16, not {array.dtype}; save the checkpoint "
                             "anew in one of them.")
        return np.asarray(array, np.float32)


def open_folder(folder: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of `folder` by name, from model.safetensors or pytorch_model.bin, in one file or in shards.

    Raises:
        ValueError: a folder without either, an incomplete or damaged file.
        ImportError: the package safetensors is missing.
    """
    for file_name, open_file in (("model.safetensors", _open_safetensors), ("pytorch_model.bin", _open_pytorch_bin)):
        index = folder / f"{file_name}.index.json"
        if (folder / file_name).exists():
            return open_file(folder / file_name)
        if index.exists():
            return _open_shards(index, open_file)
    raise ValueError(f"{folder} holds neither model.safetensors nor pytorch_model.bin (nor the index of their shards), "
                     f"but {sorted(path.name for path in folder.iterdir())}; download one of them into it.")


def _open_shards(index, open_file) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index} has no \"weight_map\" that says which file holds which tensor. Download it again.")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if path.parent != index.parent or not path.is_file():
            raise ValueError(f"{index.name} names the file {shard!r}, which is not in {index.parent}. Download it too.")
        shards[shard] = open_file(path)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{index.name} says that {shard} holds {name!r}, but it does not. Download both again.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _open_pytorch_bin(path) -> dict[str, Tensor]:
    return {name: Tensor(tensor.shape, tensor.read) for name, tensor in pytorch_bin.open_tensors(path).items()}


def _open_safetensors(path) -> dict[str, Tensor]:
    try:
        import safetensors  # the extra `hf`: only this needs it
    except ImportError:
        raise ImportError("model.safetensors is read with the package safetensors, which is not installed; run: "
                          "pip install --no-deps safetensors==0.8.0 (it is the extra hf of switch-tf).") from None
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}). Download it again.") from None
    return {name: Tensor(tuple(file.get_slice(name).get_shape()), functools.partial(file.get_tensor, name))
            for name in file.keys()}  # noqa: SIM118  a safe_open is not iterable


def read_json(path: pathlib.Path) -> dict:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}. Download it again.")
    return content


def write_json(path: pathlib.Path, content: dict) -> None:
    """Writes `content` as JSON, keys sorted, and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_folder(folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                 tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Writes float32 tensors as model.safetensors, in shards with an index beyond MAX_SHARD_BYTES.

    Args:
        folder: an existing folder.
        shapes: name -> shape of everything that `tensors` will yield, in the same order.
        tensors: names and <float32> values, taken one at a time.
    """
    shards: list[dict] = [{}]
    shard_bytes = 0
    for name, shape in shapes.items():
        if shards[-1] and shard_bytes + _num_bytes([shape]) > MAX_SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = shape
        shard_bytes += _num_bytes([shape])
    if len(shards) == 1:
        _write_safetensors(folder / "model.safetensors", shapes, tensors)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(folder / file_name, shard, tensors)
        weight_map.update(dict.fromkeys(shard, file_name))
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": _num_bytes(shapes.values())}, "weight_map": weight_map})


def _write_safetensors(path, shapes, tensors) -> None:
    """Writes the next tensors: eight bytes of header length, a JSON header, the numbers.

    By hand, because the package's `save_file` wants every tensor of the file in memory at once, and contiguous.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _num_bytes([shape])
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for expected, shape in shapes.items():
            name, tensor = next(tensors)
            assert (name, tensor.shape) == (expected, tuple(shape))
            file.write(np.ascontiguousarray(tensor, "<f4").data)
        file.flush()
        os.fsync(file.fileno())


def _num_bytes(shapes) -> int:
    return 4 * sum(int(np.prod(shape)) for shape in shapes)
