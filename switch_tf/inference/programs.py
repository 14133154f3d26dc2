"""Compiles prediction and scoring for any layout. Inputs and outputs are on the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.decoding import Greedy, log_likelihoods
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
    return _compile(lambda features: Greedy().ids(model, features, max_length, end_id), partitioner)


def compile_log_likelihoods(model: "keras.Model", partitioner: Partitioner) -> Callable[..., Any]:
    """Returns a function from features, dict of <int32>[batch, length], to their `log_likelihoods`."""
    return _compile(lambda features: log_likelihoods(model, features), partitioner)


def compile_arrays(function: Callable[..., Any], partitioner: Partitioner) -> Callable[..., Any]:
    """Compiles a function of arrays for a layout.

    Args:
        function: Function of tensors, <int32>[batch, length], that returns a nest of tensors, equal on every device.
        partitioner: Partitioner that built the variables which the function reads.

    Returns:
        The function with arrays of the host as arguments and results.
    """
    program = _compile(lambda features: function(*(features[str(place)] for place in range(len(features)))),
                       partitioner)
    return lambda *arrays: program({str(place): array for place, array in enumerate(arrays)})


def _compile(predict, partitioner):
    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            return partitioner.gather_rows(predict(features))

    program = partitioner.compile(partitioner.results(call))
    return lambda features: tf.nest.map_structure(
        np.asarray, program(partitioner.place({name: np.asarray(value)[None] for name, value in features.items()})))
