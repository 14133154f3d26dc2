"""Whether the code that runs, or is traced, may use shapes that depend on values."""

import keras

from switch_tf.partitioning.axes import is_partitioned
from switch_tf.partitioning.devices import device_type


def has_dynamic_shapes() -> bool:
    """True on the CPUs of the TensorFlow back end outside of XLA; elsewhere every shape must be known beforehand."""
    if keras.backend.backend() != "tensorflow" or is_partitioned():
        return False
    if device_type() != "CPU":
        return False
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util  # what Keras' own layers ask; there is no public name for it

    return not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
