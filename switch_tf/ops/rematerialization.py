"""Recomputes a function in the backward pass instead of keeping its activations."""

import keras

from switch_tf.ops import random
from switch_tf.partitioning import parts


def rematerialize(function, *args):
    """Calls `function(*args)` so that its intermediate results are recomputed for the gradient.

    The recomputation runs after the scopes of the forward pass were left, so it re-enters them: other random numbers
    or another share of the batch would give a wrong gradient without an error.

    Args:
        function: of tensors, to a nest of floating point tensors.
        args: tensors. Those of a floating point dtype get gradients; masks are passed around the recomputation,
            because TensorFlow would try to add up their gradients.
    """
    seed, part = random.current_seed(), parts.current_part()
    is_differentiable = [keras.backend.is_float_dtype(keras.backend.standardize_dtype(arg.dtype)) for arg in args]

    def in_scope(*differentiable):
        remaining = iter(differentiable)
        merged = [next(remaining) if is_float else arg for arg, is_float in zip(args, is_differentiable, strict=True)]
        with random.random_seed(seed), parts.part_of_batch(*part):
            return function(*merged)

    return keras.remat(in_scope)(*[arg for arg, is_float in zip(args, is_differentiable, strict=True) if is_float])
