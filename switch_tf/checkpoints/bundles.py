"""The files of a checkpoint, completed by `checkpoint.json`.

`tf.train.load_checkpoint` and `tf.train.Checkpoint(state={path: variable}).read` read the values. TensorFlow aborts its
process on an impossible shape in an index, so `check` reads the index first: a table in LevelDB's format, with blocks
of `BundleEntryProto`, a block with their places, and a footer with the place of that block.
"""

import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

import switch_tf
from switch_tf.checkpoints.folders import DESCRIPTION, FORMAT_VERSION, OWN_SUM, is_shape, own_sum
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import Piece, unfolding_of
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import put

# TensorFlow's key of the names and order of the variables.
_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
Sum = dict
_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 5  # bytes after a block: its compression and its checksum
_LARGEST = 2**30  # bytes; the index of Switch-C's 120,000 variables has 20 MB


def key_of(path: str) -> str:
    """Returns the key of a variable in `tf.train.Checkpoint(state={path: variable})`."""
    return f"state/{path.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/VARIABLE_VALUE"


def object_graph(paths: Iterable[str]) -> bytes:
    """Returns TensorFlow's description of `tf.train.Checkpoint(state={path: variable})`, without values."""
    with tempfile.TemporaryDirectory() as folder, tf.device("CPU:0"):
        prefix = tf.train.Checkpoint(
            state={path: tf.Variable(False, name="variable") for path in paths}).write(f"{folder}/state")
        return tf.train.load_checkpoint(prefix).get_tensor(_GRAPH_KEY)


def write(prefix: pathlib.Path, pieces: Iterable[Piece], graph: bytes | None = None) -> bool:
    """Writes the pieces of one process on the host's CPU. Returns False if there are none.

    Args:
        prefix: Path of the files, without their endings.
        graph: From `object_graph`, in one process.
    """
    with tf.device("CPU:0"):
        entries = [(key_of(path), text, value) for path, text, value in pieces]
        if graph is not None:
            entries.append((_GRAPH_KEY, "", tf.constant(graph)))
        if entries:
            names, texts, values = zip(*entries, strict=True)
            tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=texts, tensors=values)
    return bool(entries)


def read(prefix: Any, slices: Sequence[tuple[str, tf.DType, str]]) -> list[np.ndarray]:
    """Returns slices of variables, however they were split, in one call.

    Args:
        slices: (path, stored dtype, slice) of each variable. The slice is a `slice_text`, or "" for the whole variable.
    """
    literal, (paths, dtypes, texts) = places.Literal(prefix), zip(*slices, strict=True)
    with tf.device("CPU:0"):
        tensors = tf.raw_ops.RestoreV2(prefix=str(literal), tensor_names=list(map(key_of, paths)),
                                       shape_and_slices=list(texts), dtypes=list(dtypes))
    return [tensor.numpy() for tensor in tensors]


def data_file(prefix: Any, index: int = 0, count: int = 1) -> Any:
    """Returns the file with the values of part `index` of `count`."""
    return prefix.with_name(f"{prefix.name}.data-{index:05d}-of-{count:05d}")


def join(parts: Sequence[Any], sums: Sequence[Sum], prefix: Any) -> dict[str, Sum]:
    """Joins the files of several processes into one checkpoint, with new names and a common index.

    Args:
        parts: Prefixes that `write` has written.
        sums: Sum of the values of each part.
        prefix: Prefix of the joined files.

    Returns: Name of each joined file of values -> its sum.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=list(map(str, parts)), destination_prefix=str(prefix),
                                      delete_old_dirs=False)
    return {data_file(prefix, index, len(parts)).name: entry for index, entry in enumerate(sums)}


def describe(step: int, variables: dict[str, keras.Variable], pending_metrics: dict | None = None,
             configuration: dict | None = None, partitioner: Partitioner | None = None) -> dict:
    """Returns the description of a checkpoint, without its files.

    Args:
        pending_metrics: JSON-able sums since the last logged step.
        configuration: From `continuation.record`.
        partitioner: None for a checkpoint without optimizer.
    """
    described = {}
    for path, variable in variables.items():
        described[path] = {"shape": list(variable.shape), "dtype": variable.dtype,
                           "logical_axes": list(axes_of(variable))}
        if split_off := unfolding_of(variable).first:
            described[path]["unfolded"] = split_off
    layout = None
    if partitioner:
        used = partitioner.layout
        layout = {"mesh": ", ".join(f"{axis}={size}" for axis, size in used.mesh.items()), "rules": _rules(used.rules),
                  "at_rest_rules": _rules(used.at_rest_rules), "backend": used.backend,
                  "processes": partitioner.num_processes}
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "versions": {"switch_tf": switch_tf.__version__, "tensorflow": tf.__version__, "keras": keras.__version__},
        "layout": layout,
        "vocabulary": (configuration or {}).get("vocabulary"),
        "variables": described,
        "pending_metrics": pending_metrics,
        "configuration": configuration or {},
    }


def _rules(rules):
    return ", ".join(f"{logical} over {axes if isinstance(axes, str) else ' and '.join(axes)}"
                     for logical, axes in rules)


def sum_of(file: Any) -> Sum:
    """Returns the size and SHA-256 of a file. Waits until a local file is on disk."""
    if not places.is_local(file):
        content = file.read_bytes()
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        return {"size": os.fstat(opened.fileno()).st_size,
                "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def complete(folder: Any, description: dict, known: dict[str, Sum]) -> None:
    """Completes a checkpoint by writing its description with the sums of all files.

    Args:
        known: Name of a file -> its known sum.
    """
    files = {file.name: known.get(file.name) or sum_of(file) for file in sorted(folder.iterdir())
             if not file.name.startswith("parts.")}  # left by a process that woke after losing its run
    description = {**description, "files": files}
    put(folder / DESCRIPTION, json_lines.dumps({**description, OWN_SUM: own_sum(description)}, indent=1))
    if places.is_local(folder):
        sync(folder / DESCRIPTION)
        sync(folder)


def sync(folder: pathlib.Path) -> None:
    """Waits until a file or the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Any) -> None:
    """Raises ValueError if an index is damaged or has an impossible shape. The message is a clause."""
    content = places.content(path, _LARGEST)
    try:
        if int.from_bytes(content[-8:], "little") != _MAGIC:
            raise ValueError("it does not end as an index does")
        # The places of an unused block and of the list of blocks.
        *_, start, length, _ = _numbers(content, len(content) - _FOOTER, 4)
        for _, place in _entries(content, start, length):
            start, length, _ = _numbers(place, 0, 2)
            for key, value in _entries(content, start, length):
                if not key:  # the header
                    continue
                try:
                    shape = tensor_bundle_pb2.BundleEntryProto.FromString(value).shape
                except Exception as error:  # depends on protobuf's implementation
                    raise ValueError(f"the entry {key[:99]!r} is damaged") from error
                sizes = [one.size for one in shape.dim]
                if shape.unknown_rank or not is_shape(sizes):
                    raise ValueError(f"{key[:99]!r} has an impossible shape, of {len(sizes)} dimensions")
    except IndexError:
        raise ValueError("it is cut off") from None


def _entries(content, start, length):
    if start + length + _TRAILER > len(content) or content[start + length]:
        raise ValueError("a block is cut off or compressed")
    block = content[start:start + length]
    end, position, key = length - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while position < end:
        shared, added, size, position = _numbers(block, position, 3)
        if shared > len(key) or position + added + size > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[position:position + added]
        position += added
        yield key, block[position:position + size]
        position += size


def _numbers(content, position, count):
    """Returns little-endian numbers of 7 bits per byte, and the position after them."""
    numbers = []
    for _ in range(count):
        value = 0
        for shift in range(0, 64, 7):
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise ValueError("a number is too long")
        numbers.append(value)
    return *numbers, position


class Parts:
    """Writes a checkpoint of weights part by part, so a kill costs one part and memory holds one.

    The parts stay in `aside`. Joining links their files, so a kill then loses no part.

    Args:
        folder: Checkpoint folder. Its present files are removed.
        aside: Folder on the same file system.
        count: Number of parts.
    """

    def __init__(self, folder: pathlib.Path, aside: pathlib.Path, count: int):
        self._folder, self._aside = folder, aside
        self._names = [f"part_{index:05d}" for index in range(count)]
        for file in folder.iterdir():
            file.unlink()

    def write(self, index: int, pieces: Sequence[Piece], graph: bytes | None = None) -> Sum:
        """Writes a part, one of them with the `object_graph`. Returns the sum of its values."""
        prefix = self._aside / self._names[index]
        write(prefix, pieces, graph)
        sum_of(prefix.with_suffix(".index"))  # waits until it is on disk
        sync(self._aside)
        return sum_of(data_file(prefix))

    def join(self, entries: Sequence[Sum]) -> dict[str, Sum]:
        """Joins all parts, given the results of `write`, as the function `join` does."""
        joining = self._aside / "joining"
        shutil.rmtree(joining, ignore_errors=True)
        joining.mkdir()
        for file in self._aside.glob("part_*"):
            try:
                os.link(file, joining / file.name)
            except OSError:  # a file system without links
                shutil.copyfile(file, joining / file.name)
        return join([joining / name for name in self._names], entries, self._folder / "state")
