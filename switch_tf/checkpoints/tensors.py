"""Writes and restores checkpoints, independently of the layout and the number of processes.

A checkpoint is complete or absent: it is written under a temporary name and renamed, so a kill or a full disk leaves
the older ones intact. `folders.py` describes its files.
"""

import functools
import json
import os
import pathlib
import re
import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from switch_tf.checkpoints.folders import FORMAT_VERSION, BrokenCheckpoint, describe, outdated, path_of, steps
from switch_tf.data.batches import Batches
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.backends.pjrt_variable import PjrtVariable, checkpoint_key
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.unfolded import Unfolding, assign, stored, unfolding_of
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines, leftovers
from switch_tf.storage.whole_folder import whole_folder

Variables = dict[str, keras.Variable]


def state_variables(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> Variables:
    """Returns path -> Keras variable: the model's weights and, if given, the optimizer's variables."""
    variables = {f"model/{variable.path.partition('/')[2]}": variable for variable in model.variables}
    if optimizer is not None:
        variables.update({f"optimizer/{_without_number(variable.path)}": variable for variable in optimizer.variables
                          if not _is_learning_rate(variable.path)})
    return variables


def _without_number(path):
    """Removes the number that Keras gives to each optimizer of a process, as in "adam_1"."""
    name, slash, rest = path.partition("/")
    return re.sub(r"_\d+$", "", name) + slash + rest


def _is_learning_rate(path):
    """Whether a path is a constant learning rate. Keras makes it a variable, but the configuration decides it."""
    return path.endswith("/learning_rate")


def save(folder: str | pathlib.Path, step: int, variables: Variables, batches: Batches, pending_metrics: dict | None,
         keep: int, partitioner: Partitioner | None = None, configuration: dict | None = None,
         keep_every: int = 0) -> pathlib.Path:
    """Writes a checkpoint, unless it exists, and removes outdated ones. All processes call this together.

    Args:
        folder: path of the run's `checkpoints` folder.
        step: int.
        variables: path -> Keras variable, see `state_variables`.
        batches: data.Batches with the next training batches.
        pending_metrics: JSON-able sums since the last logged step, or None.
        keep, keep_every: int, see `folders.outdated`.
        partitioner: Partitioner. Defaults to one device.
        configuration: JSON-able, from `continuation.record`.

    Returns:
        The checkpoint folder.

    Raises:
        BrokenCheckpoint: a variable is not finite. Nothing was written.
        Refusal: the disk is full or not writable. The older checkpoints are intact.
    """
    partitioner = partitioner or Partitioner()
    _check_finite(folder, step, variables, partitioner)
    final = path_of(folder, step)
    if final.is_dir():
        _remove_outdated(folder, keep, keep_every, partitioner)  # a kill may have prevented that
        return final
    temporary = final.with_name(f"tmp.{final.name}")
    writing = functools.partial(_write, temporary, variables, batches, partitioner)
    completing = functools.partial(_complete, temporary, step, variables, pending_metrics, configuration)
    try:
        _together(partitioner, lambda: _make_empty(temporary), by_chief=True)
        _together(partitioner, writing)
        _together(partitioner, lambda: _publish(completing, temporary, final), by_chief=True)
    except (OSError, tf.errors.OpError) as error:
        if partitioner.is_lost_process(error):
            raise
        if partitioner.is_chief:
            shutil.rmtree(temporary, ignore_errors=True)
        raise Refusal(f"The checkpoint of step {step} could not be written to {folder} ({first_line(error)}); the "
                      "older ones are as they were. Make room or rights there, then start the same command again."
                      ) from error
    _remove_outdated(folder, keep, keep_every, partitioner)
    return final


def _together(partitioner, write, by_chief=False):
    """Has each process, or the first one, call `write`; waits for all, and raises in all if one fails."""
    error = None
    try:
        if partitioner.is_chief or not by_chief:
            write()
    except (OSError, tf.errors.OpError) as failure:
        if partitioner.is_lost_process(failure):
            raise
        error = failure
    if partitioner.any_process(error is not None):
        raise error or OSError("another process could not write its part and names the cause")


def _make_empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write(folder, variables, batches, partitioner):
    """Writes the files of this process."""
    partitioner.write(str(folder / "state"), {path: stored(variable) for path, variable in variables.items()})
    batches.save(folder, partitioner.process_index)


def _publish(complete, temporary, final):
    complete()
    leftovers.make_room(final, is_folder=True)
    os.rename(temporary, final)
    _sync(final.parent)


def _check_finite(folder, step, variables, partitioner):
    for path, variable in variables.items():
        if not partitioner.is_finite(variable):
            raise BrokenCheckpoint(f"{path} is not finite at step {step}, so this step is not saved; the last good "
                                   f"checkpoint is step {max(steps(folder), default=None)}.")


def _remove_outdated(folder, keep, keep_every, partitioner):
    if partitioner.is_chief:
        for old in outdated(folder, keep, keep_every):
            leftovers.remove(old)


def _complete(folder, step, variables, pending_metrics, configuration):
    """Adds the description, which completes a checkpoint."""
    for file in folder.iterdir():
        _sync(file)
    description = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "variables": {path: _described(variable) for path, variable in variables.items()},
        "files": {file.name: file.stat().st_size for file in folder.iterdir()},
        "pending_metrics": pending_metrics,
        "configuration": configuration or {},
    }
    with open(folder / "checkpoint.json", "w") as file:
        json.dump(json_lines.finite(description), file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _described(variable):
    description = {"shape": list(variable.shape), "dtype": variable.dtype, "logical_axes": list(axes_of(variable))}
    split_off = unfolding_of(variable).first
    return {**description, "unfolded": split_off} if split_off else description


def write_weights(folder: pathlib.Path, variables: Variables, configuration: dict, files: dict[str, bytes]) -> None:
    """Writes a checkpoint of weights alone, for new runs to start from, atomically.

    Args:
        folder: path that does not exist, or an empty folder.
        variables: path -> Keras variable, see `state_variables`.
        configuration: JSON-able, from `continuation.record_of_model`.
        files: name -> content of more files in the folder.

    Raises:
        Refusal: the disk is full or not writable.
    """
    folder = folder.resolve()
    try:
        with whole_folder(folder, "checkpoint.json") as unfinished:
            tf.train.Checkpoint(state={path: variable.value for path, variable in variables.items()}).write(
                str(unfinished / "state"))
            _complete(unfinished, 0, variables, None, configuration)
            for name, content in files.items():
                (unfinished / name).write_bytes(content)
    except tf.errors.OpError as error:
        raise Refusal(f"{folder} could not be written ({first_line(error)}).") from error


def restore(checkpoint: str | pathlib.Path, variables: Variables, batches: Batches | None = None) -> dict[str, Any]:
    """Restores variables and, if given, the data position from a checkpoint.

    Args:
        checkpoint: path of the checkpoint folder.
        variables: path -> Keras variable, see `state_variables`.
        batches: data.Batches, or None.

    Returns:
        The description of the checkpoint, see `folders.describe`.

    Raises:
        BrokenCheckpoint: files are missing or damaged.
        Refusal: the checkpoint belongs to another model or optimizer. The message names the first difference.
    """
    description = describe(checkpoint)
    _check_same(checkpoint, description["variables"], variables)
    try:
        _read(pathlib.Path(checkpoint) / "state", description["variables"], variables)
    except (tf.errors.OpError, AssertionError) as error:  # TensorFlow asserts that the file has every variable
        raise BrokenCheckpoint(f"{checkpoint} is damaged ({first_line(error)}).") from error
    try:
        if batches is not None:
            batches.restore(pathlib.Path(checkpoint))
    except (tf.errors.OpError, AssertionError) as error:
        raise BrokenCheckpoint(f"The position of {checkpoint} in the data is damaged, or is one in other data, "
                               "or of a version of switch_tf that read them in another order; start anew in another "
                               f"folder, from its weights if they are wanted ({first_line(error)}).") from error
    return description


def _read(prefix, saved, variables):
    """Reads variables in pieces if they are stored in the same form, and others one by one through the host."""
    unfoldings = {path: Unfolding(tuple(variable.shape), tuple(map(tuple, saved[path].get("unfolded", ()))))
                  for path, variable in variables.items()}
    others = [path for path, variable in variables.items() if unfoldings[path] != unfolding_of(variable)]
    _read_as_stored(prefix, {path: stored(variable) for path, variable in variables.items() if path not in others})
    for path in others:
        with tf.device("CPU:0"):
            held = tf.Variable(tf.zeros(unfoldings[path].stored_shape, variables[path].dtype))
        _read_as_stored(prefix, {path: held})
        assign(variables[path], unfoldings[path].fold(held.numpy(), np))


def _read_as_stored(prefix, state):
    others = {path: value for path, value in state.items() if not isinstance(value, PjrtVariable)}
    status = tf.train.Checkpoint(state=others).read(str(prefix))
    status.assert_existing_objects_matched()
    status.expect_partial()  # no warning about optimizer slots that are not read
    for path, value in state.items():
        if isinstance(value, PjrtVariable):
            value.load(functools.partial(_slice, prefix, path, value.dtype))


def _slice(prefix, path, dtype, text):
    """Reads a slice of a variable, in whatever pieces it was written."""
    (tensor,) = tf.raw_ops.RestoreV2(prefix=str(prefix), tensor_names=[checkpoint_key(path)], shape_and_slices=[text],
                                     dtypes=[dtype])
    return tensor.numpy()


def _check_same(checkpoint, saved, variables):
    parts = {path.partition("/")[0] for path in variables}  # "model" alone, or the optimizer's as well
    for path in saved:
        if path not in variables and path.partition("/")[0] in parts and not _is_learning_rate(path):
            raise Refusal(f"{checkpoint} has {path}, which this model or optimizer lacks. Start it with the "
                          "configuration it was saved with (operative_config.gin), or use another MODEL_DIR.")
    for path, variable in variables.items():
        if path not in saved:
            raise Refusal(f"{checkpoint} has no {path}, so it is of another model or optimizer. Start it with the "
                          "configuration it was saved with (operative_config.gin), or use another MODEL_DIR.")
        if saved[path]["shape"] != list(variable.shape):
            raise Refusal(f"{path} has shape {saved[path]['shape']} in {checkpoint} but {list(variable.shape)} in "
                          "this model. Start it with the configuration it was saved with (operative_config.gin), or "
                          "use another MODEL_DIR.")


def _sync(path):
    """Waits until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
