"""Replicas of a `tf.distribute` strategy under Keras' `fit` or a loop of the user, and Keras' symbolic build.

The trainer needs none of this: it sets the part of the batch and the seed of each step in the context.
"""

from typing import Any

import keras
from keras import ops

from switch_tf.partitioning.tensors import Tensor

# Keras imports TensorFlow on its own back end; on JAX's this module needs none.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from keras.src.random import seed_generator

# Any number works: the seed of the run and the layer's path make streams differ.
_OPERATION_SEED = 20210111


def replica_index() -> Any:
    """Returns the index of the running or traced replica, an int or <int32> scalar; None outside a replica."""
    if keras.backend.backend() != "tensorflow":
        return None
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return None
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def seed_in_replica() -> Tensor:
    """Draws a new seed, the same in every replica: <uint32> scalar.

    Keras' global generator belongs to the thread that created it, and the thread of a replica cannot create variables.
    TensorFlow's stateful operation needs no variable, and `keras.utils.set_random_seed` seeds it too.
    """
    return tf.cast(tf.random.uniform((), 0, 2**31 - 1, tf.int32, seed=_OPERATION_SEED), tf.uint32)


def make_global_generator() -> None:
    """Creates Keras' global generator of seeds outside the traced function.

    Created inside, it would have no value for the rest of the process if the trace ends in an error.
    """
    if keras.backend.backend() != "tensorflow":
        return
    with tf.init_scope():
        seed_generator.global_seed_generator()


def as_ids(values: Tensor) -> Tensor:
    """Returns float ids as <int32> while Keras builds a model symbolically, and any other value unchanged.

    Under a strategy Keras builds a model with the mean of the replicas' batches, which turns ids into float32.
    """
    with keras.SymbolicScope() as scope:
        is_symbolic = scope.original_scope is not None
    if is_symbolic and hasattr(values, "dtype") and keras.backend.is_float_dtype(values.dtype):
        return ops.cast(values, "int32")
    return values
