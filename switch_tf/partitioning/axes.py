"""Annotations of layers by logical axes: `add_weight` and `constrain`.

Without an active layout they are plain Keras and the identity. A back end that cuts a program over devices traces it
within `context.within(annotator=...)`. An annotator has

    layout                       Layout with a complete mesh
    is_for_compiler              whether XLA's partitioner cuts the program
    constrain, gather, scatter   as the functions here
    replicate(x)                 computes a tensor on every device

The last functions describe the visible part of the global batch: a microbatch, a replica's rows, or both. Token groups
and random numbers belong to the global batch, so parts route tokens and draw dropout masks as one pass would.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from switch_tf import context
from switch_tf.partitioning.layout import LOGICAL_AXES
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

# One logical axis per dimension; None for an unsplit one.
Axes = tuple[str | None, ...]


def is_partitioned() -> bool:
    """Returns whether a partitioner cuts the running or traced code."""
    return context.current().annotator is not None


def is_for_compiler() -> bool:
    """Returns whether XLA's partitioner cuts the traced program."""
    annotator = context.current().annotator
    return annotator is not None and annotator.is_for_compiler


def is_split(axis: str) -> bool:
    """Returns whether the active layout cuts activations along a logical axis."""
    annotator = context.current().annotator
    return annotator is not None and annotator.layout.num_pieces(axis) > 1


def with_axes(axes: Axes, create: Callable[..., keras.Variable], *args: Any, **kwargs: Any) -> keras.Variable:
    """Creates a Keras variable with `create(*args, **kwargs)`, stored by logical axes.

    Its `logical_axes` decide placement, slots, Adafactor's factoring and checkpoints.
    """
    # The storing back end receives only value and name.
    with context.within(variable_axes=tuple(axes)):
        variable = create(*args, **kwargs)
    variable.logical_axes = tuple(axes)
    return variable


def axes_of(variable: keras.Variable) -> Axes:
    """Returns a variable's logical axes; all None if it has none."""
    return getattr(variable, "logical_axes", (None,) * len(variable.shape))


def axes_of_new_variable(rank: int) -> Axes:
    """Returns the logical axes of the variable in creation."""
    axes = context.current().variable_axes
    return (None,) * rank if axes is None else axes


def check_axes(axes: Axes, rank: int, what: str) -> None:
    """Raises Refusal unless `axes` has a known logical axis or None for each dimension."""
    unknown = [axis for axis in axes if axis is not None and axis not in LOGICAL_AXES]
    if unknown:
        raise Refusal(f"{what} has the unknown logical axis {unknown[0]!r}; the axes are {sorted(LOGICAL_AXES)}.")
    if len(axes) != rank:
        raise Refusal(f"{what} has {rank} dimensions but {len(axes)} logical axes {tuple(axes)}; give one for each.")


def add_weight(layer: keras.layers.Layer, name: str, shape: tuple[int, ...], axes: Axes, initializer: Any,
               dtype: str | None = None, trainable: bool = True) -> keras.Variable:
    """Creates a weight with logical axes. Read it with `use` or `product`.

    Args:
        name: Last part of the weight's path.
        initializer: Keras initializer or its name. It is cloned, so weights may share it. Kernels need an explicit
            standard deviation: Keras' VarianceScaling takes an expert dimension for a receptive field.
        dtype: Defaults to the layer's variable dtype.
        trainable: False for state, equal in every replica.
    """
    check_axes(axes, len(shape), f"Weight {name!r} of layer {layer.name!r}")
    # Without a seed, an initializer draws one at creation, then repeats its values.
    initializer = keras.initializers.get(initializer).clone()
    return with_axes(axes, layer.add_weight, shape=shape, initializer=initializer, dtype=dtype, autocast=False,
                     name=name, trainable=trainable, aggregation="none" if trainable else "only_first_replica")


def use(variable: keras.Variable, dtype: str) -> Tensor:
    """Returns a weight's value in `dtype`, gathered if in pieces. Casts first: bfloat16 moves half the bytes."""
    return gather(ops.cast(variable, dtype), axes_of(variable))


def gather(value: Tensor, axes: Axes) -> Tensor:
    """Converts a weight's value from its stored layout to the layout of its use."""
    annotator = context.current().annotator
    return value if annotator is None else annotator.gather(value, axes)


def scatter(gradient: Tensor, axes: Axes) -> Tensor:
    """Lays out a weight's gradient as the weight is stored."""
    annotator = context.current().annotator
    return gradient if annotator is None else annotator.scatter(gradient, axes)


def arange(size: Any, dtype: str = "int32") -> Tensor:
    """Returns 0, 1, .. size - 1 as <dtype>[size]. `size` is an int or an int32 scalar tensor.

    A program cut over devices computes it: TensorFlow would fold positions and masks of up to 10 MB each into
    constants on every device.
    """
    # TensorFlow has no unsigned range on CPU.
    values = ops.cast(ops.arange(size, dtype="int32"), dtype)
    annotator = context.current().annotator
    return values if annotator is None else annotator.replicate(values)


def constrain(x: Tensor, axes: Axes) -> Tensor:
    """Lays out an activation by its logical axes."""
    check_axes(axes, len(x.shape), "An activation")
    annotator = context.current().annotator
    return x if annotator is None else annotator.constrain(x, axes)


def part_of_batch(count: int, index: Any) -> AbstractContextManager:
    """Returns a scope for part `index` (int or int32 scalar tensor) of `count`."""
    return context.within(part=context.Part(count, index))


def share_of_groups(num_groups: int) -> int:
    """Returns this part's share of the global batch's groups."""
    count = context.current().part.count
    check_parts(num_groups, count)
    return num_groups // count


def check_parts(num_groups: int, num_parts: int) -> None:
    """Raises Refusal unless each part of the batch holds whole groups."""
    if num_groups % num_parts:
        raise Refusal(
            f"A batch routed in {num_groups} groups cannot be cut into {num_parts} parts of whole groups (microbatches "
            f"times devices of the data axis). Set num_groups_multiple to a multiple of {num_parts}, or use fewer of "
            "them.")
