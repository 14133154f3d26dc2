"""Recomputes a function in the backward pass instead of keeping its activations."""

from collections.abc import Callable
from typing import Any

import keras

from switch_tf import context


def rematerialize(function: Callable, *args: Any) -> Any:
    """Calls `function(*args)` so that its intermediate results are recomputed for the gradient.

    The recomputation may run after the scopes of the forward pass were left, and re-enters their context: other random
    numbers or another part of the batch would give a wrong gradient without an error. It records no routes, because
    the function runs twice.

    Args:
        function: Function of tensors that returns a nest of floating point tensors.
        args: Nests of tensors. Floating point ones receive gradients. Others, such as masks, bypass the recomputation,
            because TensorFlow would try to add up their gradients.
    """
    tensors = keras.tree.flatten(args)
    is_differentiable = [keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)) for x in tensors]

    def run(*differentiable):
        remaining = iter(differentiable)
        merged = [next(remaining) if is_float else x for x, is_float in zip(tensors, is_differentiable, strict=True)]
        return function(*keras.tree.pack_sequence_as(args, merged))

    differentiable = [x for x, is_float in zip(tensors, is_differentiable, strict=True) if is_float]
    return keras.remat(context.carried(run, routes=None))(*differentiable)
