"""Arrays of a T5X checkpoint, opened without reading their values."""

import functools
import math
import os
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
from etils import epy

from switch_tf import checks
from switch_tf.conversion import json_files, orbax_file, t5x_file
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.refusals import Refusal, first_line

with epy.lazy_imports():  # takes a fifth of a second
    import tensorstore

_DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_CHECKPOINT = re.compile(r"(?:checkpoint_)?([0-9]{1,15})")
_INTEGERS = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}

_UNMERGED = "ocdbt.process_*"
_DESCRIPTIONS = {"zarr": ".zarray", "zarr3": "zarr.json"}


def is_t5x(folder: Any) -> bool:
    """Returns whether a folder, which may be in a bucket, is a checkpoint of T5X, in its own format or Orbax'."""
    return t5x_file.is_t5x(folder) or orbax_file.root_of(folder) is not None


def newest_in(folder: Any) -> Any | None:
    """Returns the newest checkpoint in a run folder of T5X or Orbax; None for any other folder."""
    steps = {int(found[1]): entry for entry in (folder.iterdir() if folder.is_dir() else ())
             if (found := _CHECKPOINT.fullmatch(entry.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if is_t5x(steps[step])), None)


def open_arrays(folder: pathlib.Path) -> dict[str, Tensor]:
    """Opens the weights of a checkpoint, name -> tensor. Names are like "target/encoder/encoder_norm/scale".

    Raises:
        Refusal: an array is missing, damaged, or not float32, bfloat16 or float16.
    """
    return dict(_opened(folder, "target"))


def open_state(folder: pathlib.Path) -> tuple[int, dict[str, Tensor]]:
    """Opens the optimizer's state of a checkpoint: (step, name -> slot).

    Names are like "state/param_states/encoder/encoder_norm/scale/v".

    Raises:
        Refusal: an array is missing or damaged, or has another dtype.
    """
    state = dict(_opened(folder, "state"))
    step = state.pop(t5x_file.STEP, None)
    value = np.asarray(step.load() if isinstance(step, Tensor) else step)
    if value.dtype.kind != "i" or value.size != 1 or not 0 <= value.item() < 2**31:
        raise Refusal(f"{folder} must hold its number of steps as {t5x_file.STEP!r}, and holds {checks.shown(step)}; "
                      "convert its weights alone, without --with_optimizer.")
    return value.item(), state


def _opened(folder, part):
    """Yields the name and the Tensor of each array of a part, and of a number the number itself."""
    if t5x_file.is_t5x(folder):
        leaves, driver = t5x_file.read_leaves(folder, part), "zarr"
    else:
        folder = orbax_file.root_of(folder)
        leaves, driver = orbax_file.read_leaves(folder, part)
    json_files.check_tree(folder)  # tensorstore would wait for a pipe, and go wherever a link leads
    for name, leaf in leaves.items():
        if isinstance(leaf, t5x_file.InlineArray):
            yield name, _open_inline(folder / t5x_file.FILE, name, leaf)
        else:
            yield name, leaf if isinstance(leaf, int) else _open_zarr(folder, leaf.folder, name, driver)


def _open_inline(path, name, array):
    dtype = _checked_dtype(name, array.dtype)
    if math.prod(array.shape) * dtype.itemsize != array.num_bytes:
        raise Refusal(f"{path} is damaged: {name!r} of shape {array.shape} in {array.dtype} has {array.num_bytes} "
                      "bytes; download it again.")
    return Tensor(array.shape, functools.partial(_read_inline, path, dtype, array))


def _read_inline(path, dtype, array):
    values = np.memmap(path, np.uint8, "r", array.offset, (array.num_bytes,))
    return values.view(dtype).reshape(array.shape)


def _open_zarr(folder, place, name, driver):
    where, root = folder / place, os.path.abspath(folder)  # tensorstore takes no ".."
    store = {"driver": "file", "path": f"{root}/{place}/"}
    if (folder / orbax_file.DATABASE).is_file():
        where = folder
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "path": f"{place}/"}
    elif parts := sorted(part.name for part in folder.glob(_UNMERGED)):
        raise Refusal(f"{folder} was not saved to its end: its arrays are in {checks.shown(parts)}, which the last "
                      "step of a save merges; take another checkpoint of that run.")
    elif not (where / _DESCRIPTIONS[driver]).is_file():
        raise Refusal(f"The checkpoint lacks {where / _DESCRIPTIONS[driver]}, which describes {name!r}; download that "
                      "folder too.")
    # By default tensorstore reads a missing chunk as zeros.
    array = _attempt(name, where, lambda: tensorstore.open(
        {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}, open=True, read=True).result())
    _checked_dtype(name, array.dtype.name)
    shape, chunk = tuple(array.shape), array.chunk_layout.read_chunk.shape or ()  # None for a number
    if any(part > max(size, 1) for part, size in zip(chunk, shape, strict=True)):
        raise Refusal(f"{where} is damaged: {name!r} of shape {shape} is in chunks of {tuple(chunk)}; download it "
                      "again.")
    return Tensor(shape, lambda: _attempt(name, where, lambda: array.read().result()),
                  lambda index: _attempt(name, where, lambda: array[index].read().result()))


def _attempt(name, folder, call):
    """Calls a function of tensorstore, which raises damage as a ValueError with a long description."""
    try:
        return call()
    except ValueError as error:
        reason = first_line(error).partition(" [")[0]
        raise Refusal(f"{name!r} cannot be read ({reason}); download {folder} again.") from error


def _checked_dtype(name, dtype):
    if name == t5x_file.STEP and dtype in _INTEGERS:
        return _INTEGERS[dtype]
    if dtype not in _DTYPES:
        raise Refusal(f"A weight must be float32, bfloat16 or float16, but {name!r} is {checks.shown(dtype)}; save the "
                      "checkpoint anew in one of them.")
    return _DTYPES[dtype]
