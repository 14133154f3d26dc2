"""Compiles prediction and scoring for any layout. Inputs and outputs are on the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from switch_tf import partitioning
from switch_tf.decoding import Greedy, log_likelihoods
from switch_tf.partitioning.partitioner import Partitioner

if TYPE_CHECKING:
    import keras


def compile_prediction(model: "keras.Model", max_length: int, partitioner: Partitioner | None = None,
                       end_id: int | tuple[int, ...] | None = None) -> Callable[..., Any]:
    """Returns a function that decodes greedily, from features, dict of <int32>[batch, length], to
    <int32>[batch, max_length].

    Args:
        model: SwitchTransformer, built.
        max_length, end_id: See `decoding.loop.decode`.
        partitioner: Partitioner. Default: one device.
    """
    return _compile(lambda features: Greedy().ids(model, features, max_length, end_id), partitioner)


def compile_log_likelihoods(model: "keras.Model", partitioner: Partitioner | None = None) -> Callable[..., Any]:
    """Returns a function from features, dict of <int32>[batch, length], to their `log_likelihoods`."""
    return _compile(lambda features: log_likelihoods(model, features), partitioner)


def _compile(predict, partitioner):
    partitioner = partitioner or Partitioner()

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            return partitioner.gather_rows(predict(features))

    program = partitioner.compile(partitioner.results(call))
    return lambda features: np.asarray(
        program(partitioner.place({name: np.asarray(value)[None] for name, value in features.items()})))
