"""Checkpoints, written and restored: complete or absent, independent of layout and number of processes.

One is written beside its place and renamed into it, so a kill or a full disk leaves the older ones as they were. What
its folder holds is said in `checkpoint_folders.py`.
"""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import tensorflow as tf

from switch_tf.checkpoints.folders import FORMAT_VERSION, BrokenCheckpoint, describe, outdated, path_of, steps
from switch_tf.messages import first_line
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.partitioner import Partitioner, is_lost_process
from switch_tf.partitioning.unfolded import Unfolding, assign, stored, unfolding_of
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, leftovers
from switch_tf.storage.whole_folder import whole_folder


def state_variables(model, optimizer=None) -> dict:
    """Path -> Keras variable of everything a run must remember; the model's weights alone without an optimizer."""
    variables = {f"model/{variable.path.partition('/')[2]}": variable for variable in model.variables}
    if optimizer is not None:
        variables.update({f"optimizer/{_without_number(variable.path)}": variable for variable in optimizer.variables
                          if not _is_learning_rate(variable.path)})
    return variables


def _without_number(path):
    """Keras counts the optimizers of a process, "adam" and "adam_1"; a checkpoint does not care which one it was."""
    name, slash, rest = path.partition("/")
    return re.sub(r"_\d+$", "", name) + slash + rest


def _is_learning_rate(path):
    """A constant rate is a variable in Keras; restored, it would overrule the configuration that a run goes on with."""
    return path.endswith("/learning_rate")


def save(folder, step: int, variables: dict, batches, pending_metrics: dict, keep: int,
         partitioner=None, configuration: dict | None = None, keep_every: int = 0) -> pathlib.Path:
    """Writes a checkpoint and removes what is outdated then.

    Args:
        folder: the run's `checkpoints` folder.
        variables: path -> Keras variable, see `state_variables`.
        batches: data.Batches, that the next batch comes from.
        pending_metrics: JSON-able sums since the last logged step.
        keep, keep_every: int, see `checkpoint_folders.outdated`.
        partitioner: Partitioner, by default of one device. All processes call this together; one of them writes what
            they share.
        configuration: JSON-able, from `continuation.record`.

    Raises:
        BrokenCheckpoint: a variable is not finite; nothing was written.
        Refusal: the disk is full or not writable; the older checkpoints are as they were.
    """
    partitioner = partitioner or Partitioner()
    _check_finite(folder, step, variables, partitioner)
    final = path_of(folder, step)
    if final.is_dir():
        _remove_outdated(folder, keep, keep_every, partitioner)  # a kill may have come before that
        return final
    temporary = final.with_name(f"tmp.{final.name}")
    if partitioner.is_chief:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        if partitioner.is_chief:
            temporary.mkdir(parents=True)
        partitioner.barrier()
        if partitioner.is_chief or partitioner.saves_in_every_process:
            tf.train.Checkpoint(state={path: stored(variable) for path, variable in variables.items()}).write(
                str(temporary / "state"))
        batches.save(temporary, partitioner.process_index)
        partitioner.barrier()
        if partitioner.is_chief:
            _complete(temporary, step, variables, pending_metrics, configuration)
            leftovers.make_room(final, is_folder=True)
            os.rename(temporary, final)
            _sync(final.parent)
        partitioner.barrier()
    except (OSError, tf.errors.OpError) as error:
        if partitioner.num_processes > 1 and is_lost_process(error):
            raise
        if partitioner.is_chief:
            shutil.rmtree(temporary, ignore_errors=True)
        raise Refusal(f"The checkpoint of step {step} could not be written to {folder} ({first_line(error)}); the "
                      "older ones are as they were. Make room or rights there, then start the same command again."
                      ) from error
    _remove_outdated(folder, keep, keep_every, partitioner)
    return final


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
    """Adds the description, which makes a checkpoint of a folder."""
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
    found = {"shape": list(variable.shape), "dtype": variable.dtype, "logical_axes": list(axes_of(variable))}
    split_off = unfolding_of(variable).first
    return {**found, "unfolded": split_off} if split_off else found


def write_weights(folder: pathlib.Path, variables: dict, configuration: dict, files: dict[str, bytes]) -> None:
    """Writes a checkpoint that no run stands at, for others to start from; it appears complete or not at all.

    Args:
        folder: path that is not there yet, or an empty folder.
        variables: path -> Keras variable, see `state_variables`.
        configuration: JSON-able, from `continuation.record_of_model`.
        files: name -> content of files to put beside it.

    Raises:
        Refusal: the disk is full or not writable.
    """
    folder = folder.resolve()
    try:
        with whole_folder(folder) as unfinished:
            tf.train.Checkpoint(state={path: variable.value for path, variable in variables.items()}).write(
                str(unfinished / "state"))
            _complete(unfinished, 0, variables, None, configuration)
            for name, content in files.items():
                (unfinished / name).write_bytes(content)
    except tf.errors.OpError as error:
        raise Refusal(f"{folder} could not be written ({first_line(error)}).") from error


def restore(checkpoint, variables: dict, batches=None) -> dict:
    """Assigns a checkpoint to `variables` and, if given, to data.Batches; returns its description.

    Raises:
        BrokenCheckpoint: files are missing or damaged.
        Refusal: the checkpoint is of another model or optimizer; the first variable that differs is named.
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
    """Variables that are stored as they were are read in pieces, others through the host, one after the other."""
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
    status = tf.train.Checkpoint(state=state).read(str(prefix))
    status.assert_existing_objects_matched()
    status.expect_partial()  # weights alone are read without the optimizer's slots, and TensorFlow would name them all


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
