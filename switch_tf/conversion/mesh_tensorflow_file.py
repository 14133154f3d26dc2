"""Reads the files of a TensorFlow 1 checkpoint, the format of Mesh TensorFlow.

`model.ckpt-N.index` has names and shapes, and shards such as `model.ckpt-N.data-00000-of-00016` the values. The text
file `checkpoint` names the newest one.
"""

import contextlib
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

from etils import epy

from switch_tf import checks
from switch_tf.conversion.untrusted_files import Tensor, bytes_at, check_regular
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

with epy.lazy_imports():  # slow; recognising a folder does without
    import tensorflow as tf

    from switch_tf.checkpoints import bundles

STATE = "checkpoint"
STEP = "global_step"
_INDEX, _VALUES = ".index", ".data-"
_NEWEST = re.compile(rb'model_checkpoint_path:\s*"([^"\n]*)"')
_STATE_BYTES = 4096  # the newest is in the first line
_INDICES = re.compile(r"(.*\.ckpt-\d+)\.index")
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of TensorFlow 2


def is_tensorflow(path: Any) -> bool:
    """Returns whether a path is a checkpoint or a folder of them."""
    return _has_index(path) or _newest(path) is not None or bool(_prefixes(path))


def prefix_of(path: Any) -> Any:
    """Returns `path`, or the newest checkpoint in the folder `path`."""
    if _has_index(path):
        return path
    newest, prefixes = _newest(path), _prefixes(path)
    if newest is None:
        if len(prefixes) > 1:
            raise Refusal(f"{path} holds {len(prefixes)} checkpoints, {', '.join(prefixes[:8])}, and no file {STATE!r} "
                          f"that names one of them; give the path of one, such as {path / prefixes[-1]}.")
        newest = prefixes[0]
    if not _has_index(path / newest):
        raise Refusal(f"{path / STATE} names the checkpoint {checks.shown(newest)}, and {newest}{_INDEX} is missing; "
                      "download it too, or give the path of another checkpoint.")
    return path / newest


def open_variables(prefix: Any, is_read: Callable[[str], bool]) -> dict[str, Tensor]:
    """Opens the wanted variables of a checkpoint such as `folder/model.ckpt-1000`, name -> tensor."""
    _check_shards(prefix)
    index, literal = prefix.parent / f"{prefix.name}{_INDEX}", places.Literal(prefix)
    check_regular(index)
    with _refusing(prefix, f"{prefix}{_INDEX}", "it"):
        bundles.check(index)
        reader = tf.train.load_checkpoint(str(literal))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    if _OBJECTS in shapes:
        raise Refusal(f"{prefix} is a checkpoint of TensorFlow 2, as Keras and tf.train.Checkpoint write them; of "
                      "TensorFlow's only those of Mesh TensorFlow are read.")

    def read(name, literal=literal):  # `literal` stays open as long as the reader
        with _refusing(prefix, repr(name), f"the files {prefix.name}{_VALUES}*"):
            return reader.get_tensor(name)

    tensors = {}
    for name in filter(is_read, sorted(shapes)):
        if name != STEP and dtypes[name] not in (tf.float32, tf.bfloat16, tf.float16):
            raise Refusal(f"A weight must be float32, bfloat16 or float16, but {checks.shown(name)} in {prefix} is "
                          f"{dtypes[name].name}; give a checkpoint of Mesh TensorFlow.")
        tensors[name] = Tensor(tuple(shapes[name]), functools.partial(read, name))
    return tensors


@contextlib.contextmanager
def _refusing(prefix, what, files):
    """Refuses damaged files."""
    try:
        yield
    # TensorFlow's reader raises IndexError for OUT_OF_RANGE, ValueError for INVALID_ARGUMENT.
    except (tf.errors.OpError, IndexError, ValueError) as error:
        places.raise_failure(error, prefix)  # of the bucket
        raise Refusal(f"{what} cannot be read ({first_line(error)}); download {files} again.") from error


def _has_index(path):
    return (path.parent / f"{path.name}{_INDEX}").is_file()


def _newest(folder):
    """Returns the checkpoint's name in the file `checkpoint`."""
    path = folder / STATE
    if not path.is_file():
        return None
    match = _NEWEST.match(bytes_at(path, 0, _STATE_BYTES))
    # The path is of the machine that wrote it.
    return pathlib.PurePosixPath(match[1].decode(errors="replace")).name if match else None


def _prefixes(folder):
    """Returns the names of a folder's checkpoints, oldest first."""
    names = [match[1] for entry in (folder.iterdir() if folder.is_dir() else ())
             if (match := _INDICES.fullmatch(entry.name))]
    return sorted(names, key=lambda name: (int(name.rpartition("-")[2]), name))


def _check_shards(prefix):
    start = f"{prefix.name}{_VALUES}"
    pattern = re.compile(rf"{re.escape(start)}(\d{{5}})-of-(\d{{5}})")
    shards = [match for entry in prefix.parent.iterdir() if (match := pattern.fullmatch(entry.name))
              and entry.is_file()]  # no pipe
    for match in shards:
        check_regular(prefix.parent / match[0])
    totals = sorted({int(match[2]) for match in shards})
    if len(totals) > 1:
        raise Refusal(f"{prefix.parent} holds shards of {prefix.name} of {totals[0]} and of {totals[-1]} files; remove "
                      "those of another checkpoint.")
    if missing := set(range(totals[0] if totals else 1)) - {int(match[1]) for match in shards}:
        name = f"{start}{min(missing):05d}-of-{totals[0]:05d}" if totals else f"{start}00000-of-..."
        raise Refusal(f"{prefix.parent} lacks {name}, which has values of the checkpoint {prefix.name}; download it "
                      "too.")
