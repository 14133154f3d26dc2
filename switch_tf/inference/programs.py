"""Compiles prediction and scoring for any layout. Inputs and outputs are on the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.decoding import Greedy
from switch_tf.partitioning.partitioner import Partitioner

if TYPE_CHECKING:
    import keras


def compile_prediction(model: "keras.Model", max_length: int, partitioner: Partitioner,
                       end_id: int | tuple[int, ...] | None = None) -> Callable[..., Any]:
    """Returns a function that decodes greedily, from features, dict of <int32>[batch, length], to
    <int32>[batch, max_length].

    Args:
        model: SwitchTransformer, built.
        max_length, end_id: See `decoding.Sampler.decode`.
        partitioner: Partitioner.
    """
    return compile_features(lambda features: Greedy().ids(model, features, max_length, end_id), partitioner)


def compile_features(function: Callable[[dict[str, Any]], Any], partitioner: Partitioner,
                     join: Callable[[Any], Any] | None = None, use_xla: bool = False) -> Callable[[dict], Any]:
    """Compiles a function of features for a layout.

    Args:
        function: Function of dict of <int32>[batch, length] that returns a nest of tensors, equal on every device.
        partitioner: Partitioner that built the variables which the function reads.
        join: Function that joins the results of all parts of the batch. Defaults to `partitioner.gather_rows`.
        use_xla: bool. Whether XLA compiles the program.

    Returns:
        The function with arrays of the host as features and results.
    """
    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            return (join or partitioner.gather_rows)(function(features))

    program = partitioner.compile(partitioner.results(call), use_xla)
    return lambda features: tf.nest.map_structure(
        np.asarray, program(partitioner.place({name: np.asarray(value)[None] for name, value in features.items()})))
