"""The annotations that layers make: a weight has logical axes, and an activation is constrained by its logical axes.

Without an active layout all of them are plain Keras and the identity, so a layer runs and is tested on one CPU as it
is. A back end that cuts one program over devices is the context's annotator while that program is traced.
"""

from typing import Any, Protocol

import keras
from keras import ops

from switch_tf import context
from switch_tf.partitioning.layout import LOGICAL_AXES, Layout
from switch_tf.refusals import Refusal


class Annotator(Protocol):
    """Lays out the tensors of one program for many devices, while `context.within(annotator=...)` names it.

    Attributes:
        layout: Layout with its mesh complete.
        is_for_compiler: Whether XLA's partitioner cuts the program.
    """

    layout: Layout
    is_for_compiler: bool

    def constrain(self, x: Any, axes: tuple) -> Any:
        """Lays out an activation by its logical axes."""

    def gather(self, value: Any, axes: tuple) -> Any:
        """Lays out a weight's value as it is used, from how it is stored."""

    def scatter(self, gradient: Any, axes: tuple) -> Any:
        """Lays out a weight's gradient as the weight is stored."""

    def replicate(self, x: Any) -> Any:
        """Lets each device compute a tensor for itself."""


def is_partitioned() -> bool:
    """Whether the running or traced code is one program that a partitioner cuts over many devices."""
    return context.current().annotator is not None


def is_for_compiler() -> bool:
    """Whether XLA's partitioner cuts the traced program, for a TPU or for a test."""
    annotator = context.current().annotator
    return annotator is not None and annotator.is_for_compiler


def is_split(axis: str) -> bool:
    """Whether an active layout cuts activations along this logical axis."""
    annotator = context.current().annotator
    return annotator is not None and annotator.layout.num_pieces(axis) > 1


def with_axes(axes, create, *args, **kwargs):
    """Calls `create(*args, **kwargs)`, which makes one Keras variable, to be stored by these logical axes.

    Args:
        axes: tuple, a logical axis or None (not split) for each dimension.

    Returns:
        The variable, whose axes `axes_of` reads: placement, optimizer slots, Adafactor's factoring and checkpoints do.
    """
    # The back end that stores a variable receives its value and its name only.
    with context.within(variable_axes=tuple(axes)):
        variable = create(*args, **kwargs)
    variable.logical_axes = tuple(axes)
    return variable


def axes_of(variable) -> tuple[str | None, ...]:
    """Logical axes of a Keras variable; no axis for each dimension of one that was made without."""
    return getattr(variable, "logical_axes", (None,) * len(variable.shape))


def axes_of_new_variable(rank: int) -> tuple[str | None, ...]:
    """`axes_of` the variable of this rank that is being made, for the back end that makes it."""
    axes = context.current().variable_axes
    return (None,) * rank if axes is None else axes


def check_axes(axes, rank: int, what: str) -> None:
    """Raises Refusal unless `axes` names each of `rank` dimensions with a known logical axis or None."""
    unknown = [axis for axis in axes if axis is not None and axis not in LOGICAL_AXES]
    if unknown:
        raise Refusal(f"{what} has the unknown logical axis {unknown[0]!r}; the axes are {sorted(LOGICAL_AXES)}.")
    if len(axes) != rank:
        raise Refusal(f"{what} has {rank} dimensions but {len(axes)} logical axes {tuple(axes)}; give one for each.")


def add_weight(layer: keras.layers.Layer, name: str, shape, axes, initializer, dtype=None):
    """Creates a trainable weight whose dimensions carry logical axes; `use` and `product` read it.

    Args:
        layer: the layer that owns the weight.
        name: str, the last part of the weight's path.
        shape: tuple of int.
        axes: tuple of str, one logical axis for each dimension.
        initializer: a Keras initializer, or its name, whose clone makes the values: one object may be given to
            several weights. For kernels one with an explicit standard deviation: Keras' VarianceScaling takes the
            expert dimension of a stacked kernel for a receptive field.
        dtype: of the variable; by default the layer's variable dtype.

    Returns:
        keras.Variable with these axes, see `with_axes`.
    """
    check_axes(axes, len(shape), f"Weight {name!r} of layer {layer.name!r}")
    # An initializer without a seed draws one when it is made, and repeats its values ever after.
    initializer = keras.initializers.get(initializer).clone()
    return with_axes(axes, layer.add_weight, shape=shape, initializer=initializer, dtype=dtype, autocast=False,
                     name=name)


def use(variable, dtype):
    """The value of a weight from `add_weight` for a computation in `dtype`, gathered where it is stored in pieces.

    Cast first, so that half as many bytes travel for a computation in bfloat16.
    """
    return gather(ops.cast(variable, dtype), axes_of(variable))


def gather(value, axes):
    """A weight's value from how it is stored to how it is used; the identity when no layout is active."""
    annotator = context.current().annotator
    return value if annotator is None else annotator.gather(value, axes)


def scatter(gradient, axes):
    """A weight's gradient as the weight is stored; the identity when no layout is active."""
    annotator = context.current().annotator
    return gradient if annotator is None else annotator.scatter(gradient, axes)


def arange(size, dtype="int32"):
    """0, 1, .. size - 1: <dtype>[size]; `size`: int or int32 scalar tensor.

    In a program that is cut over devices nothing made of it becomes a constant: TensorFlow would fold positions and
    masks of up to 10 MB each into the program, and every device would keep all of them.
    """
    # Cast, because TensorFlow has no unsigned range on CPU.
    values = ops.cast(ops.arange(size, dtype="int32"), dtype)
    annotator = context.current().annotator
    return values if annotator is None else annotator.replicate(values)


def constrain(x, axes):
    """Says by logical axes how an activation is laid out; the identity when no layout is active.

    Args:
        x: tensor.
        axes: tuple, a logical axis or None (not split) for each dimension of `x`.
    """
    check_axes(axes, len(x.shape), "An activation")
    annotator = context.current().annotator
    return x if annotator is None else annotator.constrain(x, axes)
