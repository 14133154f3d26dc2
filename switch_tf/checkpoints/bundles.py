"""The files of TensorFlow's checkpoints, written from pieces in host memory.

`tf.train.load_checkpoint` and `tf.train.Checkpoint(state={path: variable}).read` read them, and `RestoreV2` reads any
slice of a variable, in whatever pieces it was written.
"""

import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from switch_tf.partitioning.variables import Piece
from switch_tf.storage import places

# TensorFlow's key of the names and the order of the variables, by which `tf.train.Checkpoint` finds them again.
_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


def key_of(path: str) -> str:
    """Returns the name under which `tf.train.Checkpoint(state={path: variable})` stores a variable."""
    return f"state/{path.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/VARIABLE_VALUE"


def object_graph(paths: Iterable[str]) -> bytes:
    """Returns TensorFlow's description of `tf.train.Checkpoint(state={path: variable})`, which has no values."""
    with tempfile.TemporaryDirectory() as folder, tf.device("CPU:0"):
        stand_ins = {path: tf.Variable(False, name="variable") for path in paths}
        prefix = tf.train.Checkpoint(state=stand_ins).write(f"{folder}/state")
        return tf.train.load_checkpoint(prefix).get_tensor(_GRAPH_KEY)


def write(prefix: pathlib.Path, pieces: Iterable[Piece], graph: bytes | None = None) -> bool:
    """Writes the pieces of one process on the host's CPU. Returns False if there is nothing to write.

    Args:
        prefix: Path of the files, without their endings.
        pieces: Pieces of variables.
        graph: From `object_graph`, in one of the processes.
    """
    with tf.device("CPU:0"):
        entries = [(key_of(path), text, value) for path, text, value in pieces]
        if graph is not None:
            entries.append((_GRAPH_KEY, "", tf.constant(graph)))
        if entries:
            names, texts, values = zip(*entries, strict=True)
            tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=texts, tensors=values)
    return bool(entries)


def read(prefix: pathlib.Path, slices: Sequence[tuple[str, tf.DType, str]]) -> list[np.ndarray]:
    """Returns slices of variables, in whatever pieces they were written, with one look at the files.

    Args:
        prefix: Path of the files, without their endings.
        slices: Path of each variable, its stored dtype, and the place of the slice, see `pieces.slice_text`. "" for the
            whole variable.
    """
    literal, (paths, dtypes, texts) = places.Literal(prefix), zip(*slices, strict=True)
    with tf.device("CPU:0"):
        tensors = tf.raw_ops.RestoreV2(prefix=str(literal), tensor_names=list(map(key_of, paths)),
                                       shape_and_slices=list(texts), dtypes=list(dtypes))
    return [tensor.numpy() for tensor in tensors]


def data_file(prefix: pathlib.Path, index: int = 0, count: int = 1) -> pathlib.Path:
    """Returns the file with the values of part `index` of `count`."""
    return prefix.with_name(f"{prefix.name}.data-{index:05d}-of-{count:05d}")


def join(parts: list[pathlib.Path], prefix: pathlib.Path) -> None:
    """Joins the files of several processes to those of one checkpoint, by new names and a common index.

    Args:
        parts: Prefixes that `write` has written. The values of part i become `data_file(prefix, i, len(parts))`.
        prefix: Path of the joined files, without their endings.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=list(map(str, parts)), destination_prefix=str(prefix),
                                      delete_old_dirs=False)
