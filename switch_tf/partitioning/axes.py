"""The two annotations that layers make: a weight is created with logical axes, an activation is constrained by them.

Without an active layout both are plain Keras and the identity, so a layer runs and is tested on one CPU as it is.
"""

import keras

# T5X's words. `router_expert` names the columns of a router, which are never split, unlike the experts themselves.
LOGICAL_AXES = frozenset((
    "batch", "length", "vocab", "embed", "heads", "kv", "mlp", "relpos_buckets",
    "group", "expert", "expert_mlp", "router_expert", "capacity"))


def check_axes(axes, rank: int, what: str) -> None:
    """Raises ValueError unless `axes` names each of `rank` dimensions with a known logical axis or None."""
    unknown = [axis for axis in axes if axis is not None and axis not in LOGICAL_AXES]
    if unknown:
        raise ValueError(f"{what} has the unknown logical axis {unknown[0]!r}; the axes are {sorted(LOGICAL_AXES)}.")
    if len(axes) != rank:
        raise ValueError(f"{what} has {rank} dimensions but {len(axes)} logical axes {tuple(axes)}; give one for each.")


def add_weight(layer: keras.layers.Layer, name: str, shape, axes, initializer, dtype=None, autocast=True):
    """Creates a trainable weight whose dimensions carry logical axes.

    Args:
        layer: the layer that owns the weight.
        name: str, the last part of the weight's path.
        shape: tuple of int.
        axes: tuple of str, one logical axis for each dimension.
        initializer: a Keras initializer. For kernels one with an explicit standard deviation: Keras' VarianceScaling
            takes the expert dimension of a stacked kernel for a receptive field.
        dtype: of the variable; by default the layer's variable dtype.
        autocast: bool. False keeps the variable's dtype inside a layer that computes in bfloat16.

    Returns:
        keras.Variable with `logical_axes`: placement, optimizer slots, Adafactor's factoring and checkpoints read it.
    """
    check_axes(axes, len(shape), f"Weight {name!r} of layer {layer.name!r}")
    variable = layer.add_weight(shape=shape, initializer=initializer, dtype=dtype, autocast=autocast, name=name)
    variable.logical_axes = tuple(axes)
    return variable


def constrain(x, axes):
    """Says by logical axes how an activation is laid out; the identity when no layout is active.

    Args:
        x: tensor.
        axes: tuple, a logical axis or None (not split) for each dimension of `x`.
    """
    check_axes(axes, len(x.shape), "An activation")
    return x
