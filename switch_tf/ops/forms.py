"""Implementations of operations for the current device."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from switch_tf import context
from switch_tf.hardware.devices import IS_TENSORFLOW, device_type
from switch_tf.partitioning.axes import is_for_compiler, is_partitioned
from switch_tf.partitioning.tensors import Tensor

# Keras' back end imports it anyway.
if IS_TENSORFLOW:
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util  # no public name; Keras' layers use it
else:
    import jax

_TPU_QUERIES = 256


def fused(function: Callable, arguments: tuple, is_worth_it: bool) -> Any:
    """Returns `function(*arguments)`, compiled by XLA for a CPU if possible.

    Requires a TensorFlow program for one CPU with known shapes.
    """
    if not is_worth_it or not _can_fuse(arguments):
        return function(*arguments)

    def traced(*arguments):
        with context.within(fused_program=(tf.compat.v1.get_default_graph(), {})):
            return function(*arguments)

    return tf.function(traced, autograph=False, jit_compile=True)(*arguments)


def is_fused() -> bool:
    """Returns whether the traced code is in a program of `fused`."""
    return context.current().fused_program is not None


def can_fuse() -> bool:
    """Returns whether `fused` can compile functions here, given known shapes."""
    return IS_TENSORFLOW and not is_partitioned() and device_type() == "CPU"


def _can_fuse(arguments):
    if not can_fuse():
        return False
    tensors = [value for value in tf.nest.flatten(arguments) if tf.is_tensor(value)]
    return (tf.inside_function() and not tf.distribute.has_strategy() and _has_dynamic_shapes()
            and all(tensor.shape.is_fully_defined() for tensor in tensors))


def prefers_products() -> bool:
    """Returns whether to multiply by a one-hot mask instead of indexing.

    A partitioner follows products across devices. XLA's top-k on a CPU is ten times as slow as TensorFlow's.
    """
    return is_partitioned() or is_fused() or device_type() == "TPU"


def queries_at_a_time() -> int | None:
    """Returns the number of queries in a block of attention; None for all queries.

    On a TPU a block's scores stay on the chip. This halves the time of a layer of Switch-Base (docs/compile.md).
    """
    return _TPU_QUERIES if divides_outputs() else None


def divides_outputs() -> bool:
    """Returns whether attention divides its outputs, not each probability, by the sums of the exponentials.

    On a TPU this saves a pass over float32 scores, the longest of a layer (docs/notebook/tpu.md).
    """
    # Programs cut over CPUs take a TPU's form, for tests.
    return device_type() == "TPU" or is_for_compiler() and device_type() != "GPU"


def suited_dispatches() -> tuple[str, ...]:
    """Returns the dispatches (`layers.dispatch`) that work here, the fastest first.

    "ragged" is first wherever it works, but faster only with enough empty slots.
    """
    if is_partitioned():
        return ("einsum",)  # the rest index rows in the memory of one device
    if is_fused():
        return ("index", "einsum")
    if prefers_products():
        return ("einsum", "index")
    return ("ragged", "index", "einsum") if _has_dynamic_shapes() else ("index", "einsum")


def compiled(function: Callable, ranks: tuple[int, ...] | None = None) -> Callable:
    """Returns the function as a `tf.function`, and on JAX unchanged: JAX compiles loops anyway.

    Args:
        ranks: Ranks of the <int32> arguments, for one program for all sizes. By default each shape has a program.
    """
    if not IS_TENSORFLOW:
        return function
    signature = None if ranks is None else [tf.TensorSpec([None] * rank, tf.int32) for rank in ranks]
    return tf.function(function, autograph=False, input_signature=signature)


def known_values(x: Tensor) -> np.ndarray | None:
    """Returns the values of an eager tensor of one device, else None."""
    if is_partitioned() or keras.utils.is_keras_tensor(x):
        return None
    if IS_TENSORFLOW:
        return x.numpy() if isinstance(x, tf.__internal__.EagerTensor) else None
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _has_dynamic_shapes():
    """Returns whether shapes may depend on values."""
    if not IS_TENSORFLOW or device_type() != "CPU":
        return False
    return not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def rematerialize(function: Callable, *args: Any) -> Any:
    """Calls `function(*args)` so that the gradient recomputes its intermediate results.

    The recomputation re-enters the context of the forward pass: different random numbers or another part of the batch
    would silently give a wrong gradient. It records no routes, because the function runs twice.

    Args:
        function: Returns a nest of floating point tensors.
        args: Nests of tensors. Only floating point tensors pass through the recomputation and receive gradients:
            TensorFlow would try to add gradients of the rest, such as masks.
    """
    tensors = keras.tree.flatten(args)
    is_differentiable = [keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)) for x in tensors]

    def run(*differentiable):
        remaining = iter(differentiable)
        merged = [next(remaining) if is_float else x for x, is_float in zip(tensors, is_differentiable, strict=True)]
        return function(*keras.tree.pack_sequence_as(args, merged))

    differentiable = [x for x, is_float in zip(tensors, is_differentiable, strict=True) if is_float]
    return keras.remat(context.carried(run, routes=None))(*differentiable)
