"""Which form of an operation suits the code that runs, or is traced: by index, by products, by shapes of values; and
one program in place of many operations."""

import keras
import numpy as np

from switch_tf import context
from switch_tf.hardware.devices import device_type
from switch_tf.partitioning.axes import is_for_compiler, is_partitioned

# Keras imports the library of its back end anyway.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util  # Keras' own layers use it; it has no public name
else:
    import jax

_TPU_QUERIES = 256


class FusedProgram:
    """A program of `fused` while it is traced.

    Args:
        graph: tf.Graph of the program, for tensors that its loops share.
    """

    def __init__(self, graph):
        self.graph, self.shared_tensors = graph, {}


def fused(function, arguments, is_worth_it: bool):
    """`function(*arguments)`, as a program that XLA compiles for a CPU where it is worth it and can be.

    It can be within a program of TensorFlow's for one CPU, where all shapes are known: XLA compiles none else, and
    elsewhere a program is XLA's from the start, or nobody measured it.
    """
    if not is_worth_it or not _can_fuse(arguments):
        return function(*arguments)

    def traced(*arguments):
        with context.within(fused_program=FusedProgram(tf.compat.v1.get_default_graph())):
            return function(*arguments)

    return tf.function(traced, autograph=False, jit_compile=True)(*arguments)


def is_fused() -> bool:
    """Whether the code that is traced becomes a program of `fused`."""
    return context.current().fused_program is not None


def once(key, make):
    """What `make` returns, made once in a program of `fused`, before its loops, for all that ask by the same key.

    XLA would draw a reshape or a cast of a weight into the product with it, which is then computed number by number,
    and do so in each step.

    Args:
        key: hashable, says what is made.
        make: function without arguments, of tensors that no loop changes, such as weights.
    """
    program = context.current().fused_program
    if key not in program.shared_tensors:
        with program.graph.as_default():
            program.shared_tensors[key] = make()
    return program.shared_tensors[key]


def can_fuse() -> bool:
    """Whether there are programs of `fused` here, given shapes that are known."""
    return keras.backend.backend() == "tensorflow" and not is_partitioned() and device_type() == "CPU"


def _can_fuse(arguments):
    if not can_fuse():
        return False
    tensors = [one for one in tf.nest.flatten(arguments) if tf.is_tensor(one)]
    return (tf.inside_function() and not tf.distribute.has_strategy() and _has_dynamic_shapes()
            and all(one.shape.is_fully_defined() for one in tensors))


def prefers_products() -> bool:
    """Whether to take a product with a one-hot mask for an index, which a partitioner follows across devices.

    Also for XLA's programs on CPU, whose top-k takes ten times as long as TensorFlow's.
    """
    return is_partitioned() or is_fused() or device_type() == "TPU"


def queries_at_a_time() -> int | None:
    """How many queries attention takes at a time; None for all of them.

    On a TPU scores of so many stay on the chip: a layer of Switch-Base then takes half of the time (docs/compile.md).
    """
    return _TPU_QUERIES if is_for_compiler() or device_type() == "TPU" else None


def suited_dispatches() -> tuple[str, ...]:
    """Names of the dispatches (`layers.dispatch`) that can be used here, the best one first.

    "ragged" is the first where it can be used at all, although it pays only where enough slots would stay empty.
    """
    if is_partitioned():
        return ("einsum",)  # the others move rows by their place in one device's memory
    if is_fused():
        return ("index", "einsum")
    if prefers_products():
        return ("einsum", "index")
    return ("ragged", "index", "einsum") if _has_dynamic_shapes() else ("index", "einsum")


def compiled(function, ranks: tuple[int, ...] | None = None):
    """The function as a program: a `tf.function`; on JAX, whose loops are compiled anyway, as it is.

    Args:
        function: of tensors.
        ranks: of the arguments, which are then <int32> and of any size in one program. By default every shape has a
            program of its own, which knows it.
    """
    if keras.backend.backend() != "tensorflow":
        return function
    signature = None if ranks is None else [tf.TensorSpec([None] * rank, tf.int32) for rank in ranks]
    return tf.function(function, autograph=False, input_signature=signature)


def known_values(x) -> np.ndarray | None:
    """The values of a tensor where they are known now; None while tracing, and where devices hold pieces of it."""
    if is_partitioned() or keras.utils.is_keras_tensor(x):
        return None
    if keras.backend.backend() == "tensorflow":
        return x.numpy() if isinstance(x, tf.__internal__.EagerTensor) else None
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _has_dynamic_shapes():
    """True on the CPUs of the TensorFlow back end outside of XLA; elsewhere every shape must be known beforehand."""
    if keras.backend.backend() != "tensorflow" or device_type() != "CPU":
        return False
    return not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
