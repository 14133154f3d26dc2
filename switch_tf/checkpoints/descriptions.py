"""Writes `checkpoint.json`, which completes a checkpoint and describes its variables, files and circumstances."""

import hashlib
import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

import switch_tf
from switch_tf.checkpoints.folders import DESCRIPTION, FORMAT_VERSION, OWN_SUM, own_sum
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import unfolding_of
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import put

Sum = dict[str, Any]


def describe(step: int, variables: dict[str, keras.Variable], pending_metrics: dict | None = None,
             configuration: dict | None = None, partitioner: Partitioner | None = None) -> dict[str, Any]:
    """Returns the description of a checkpoint, without its files.

    Args:
        step: int.
        variables: path -> Keras variable.
        pending_metrics: JSON-able sums since the last logged step, or None.
        configuration: JSON-able, from `continuation.record`.
        partitioner: Partitioner that trains. None for a checkpoint of weights alone.
    """
    configuration = configuration or {}
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "versions": {"switch_tf": switch_tf.__version__, "tensorflow": tf.__version__, "keras": keras.__version__},
        "layout": partitioner and _in_words(partitioner),
        "vocabulary": configuration.get("vocabulary"),
        "variables": {path: _described(variable) for path, variable in variables.items()},
        "pending_metrics": pending_metrics,
        "configuration": configuration,
    }


def _described(variable):
    description = {"shape": list(variable.shape), "dtype": variable.dtype, "logical_axes": list(axes_of(variable))}
    split_off = unfolding_of(variable).first
    return {**description, "unfolded": split_off} if split_off else description


def _in_words(partitioner):
    layout = partitioner.layout
    return {"mesh": ", ".join(f"{axis}={size}" for axis, size in layout.mesh.items()), "rules": _rules(layout.rules),
            "at_rest_rules": _rules(layout.at_rest_rules), "backend": layout.backend,
            "processes": partitioner.num_processes}


def _rules(rules):
    return ", ".join(f"{logical} over {axes if isinstance(axes, str) else ' and '.join(axes)}"
                     for logical, axes in rules)


def sum_of(file: Any) -> Sum:
    """Returns the size and the SHA-256 of a file, and waits until it is on disk, if that is where it is."""
    if not places.is_local(file):
        content = file.read_bytes()
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        return {"size": os.fstat(opened.fileno()).st_size,
                "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def complete(folder: Any, description: dict[str, Any], known: dict[str, Sum] | None = None) -> None:
    """Writes the description and the sums of all files, which completes a checkpoint.

    Args:
        folder: Checkpoint folder.
        description: From `describe`.
        known: Name of a file -> its sum, of files that need not be read again.
    """
    known = known or {}
    files = {file.name: known.get(file.name) or sum_of(file) for file in sorted(folder.iterdir())
             if not file.name.startswith("parts.")}  # of a process that woke up after another one had taken its run
    described = json_lines.loads(json_lines.dumps({**description, "files": files}))
    text = json_lines.dumps({**described, OWN_SUM: own_sum(described)}, indent=1)
    if not places.is_local(folder):
        put(folder / DESCRIPTION, text)
        return
    with open(folder / DESCRIPTION, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def sync(folder: pathlib.Path) -> None:
    """Waits until the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
