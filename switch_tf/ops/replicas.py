"""Replicas of a `tf.distribute` strategy that Keras' `fit` or the user's own loop runs, and Keras' symbolic build.

The package's trainer needs none of this: it gives each part of the batch its place (`parts`) and each step its seed.
"""

import keras
from keras import ops

# Keras imports TensorFlow on its own back end; on JAX's this module needs none.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from keras.src.random import seed_generator

# Any number will do: the seed of the run and the layer's path make streams differ.
_OPERATION_SEED = 20210111


def replica_index():
    """Index of the replica that runs or is traced, an int or <int32> scalar; None outside of any."""
    if keras.backend.backend() != "tensorflow":
        return None
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return None
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def seed_in_replica():
    """A new seed, the same in every replica: <uint32> scalar.

    Keras' global generator belongs to the thread that made it, and each replica has a thread of its own, which can
    make no variable. TensorFlow's stateful operation has no variable; `keras.utils.set_random_seed` seeds it as well.
    """
    return tf.cast(tf.random.uniform((), 0, 2**31 - 1, tf.int32, seed=_OPERATION_SEED), tf.uint32)


def make_global_generator() -> None:
    """Creates Keras' global generator of seeds outside of the function that is traced.

    Created inside, it would stay without a value for the rest of the process if that trace ends in an error.
    """
    if keras.backend.backend() != "tensorflow":
        return
    with tf.init_scope():
        seed_generator.global_seed_generator()


def as_ids(values):
    """Ids as integers, where Keras builds a model symbolically; elsewhere and anything else as it is.

    Under a strategy Keras builds a model with the mean of the replicas' batches, and so with float32 ids.
    """
    with keras.SymbolicScope() as scope:
        is_symbolic = scope.original_scope is not None
    if is_symbolic and hasattr(values, "dtype") and keras.backend.is_float_dtype(values.dtype):
        return ops.cast(values, "int32")
    return values
