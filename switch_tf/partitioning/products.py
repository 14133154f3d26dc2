"""Products of activations with weights."""

import contextlib
import math

import keras
from keras import ops

from switch_tf.partitioning import axes, forms
from switch_tf.partitioning.dtypes import widen

# Of so many, a product with a transposed weight takes half to a fifth of the time as its own transpose on CPU: the
# tied logits of a few sequences that are decoded.
_FEW_ROWS = 32


def product(equation: str, x, variable, dtype=None):
    """`einsum(equation, x, weight)` of numbers in the dtype of `x`, for a weight from `add_weight`.

    Where one program is cut over many devices, the gradient of the weight is a float32 product of its own: autodiff
    would make it in bfloat16, and the devices would add up their parts of it in bfloat16.

    Args:
        equation: str, such as "blm,mf->blf"; each index stands in two of the three terms or in all.
        x: tensor.
        variable: keras.Variable from `add_weight`.
        dtype: of the result, by default that of `x`. "float32" keeps the sums of bfloat16 products as they are, and
            gradients come back unrounded.
    """
    terms, result = equation.split("->")
    left, right = terms.split(",")
    dtype = dtype or x.dtype
    # Both operands are widened, which is exact: TensorFlow has no product of two dtypes' widths but in XLA, Keras has
    # none on JAX, and a TPU's compiler takes the widening back (docs/decisions.md).
    if not axes.is_partitioned():
        x, weight = ops.cast(x, dtype), ops.cast(axes.use(variable, x.dtype), dtype)
        if _is_matmul(left, right, result):
            return ops.matmul(x, weight)
        if len(right) == 2 and _is_matmul(left, right[::-1], result):
            # Of a batch of any size, where it is a step of decoding: one position of each sequence.
            is_step = x.shape[-2] is not None and math.prod(length or 1 for length in x.shape[:-1]) <= _FEW_ROWS
            if is_step and not forms.is_fused():
                rows = ops.transpose(ops.reshape(x, (-1, x.shape[-1])))
                return ops.reshape(ops.transpose(ops.matmul(weight, rows)), (*ops.shape(x)[:-1], weight.shape[0]))
            return ops.matmul(x, ops.transpose(weight))
        count = _num_contracted(left, right, result)
        if forms.is_fused() and count and math.prod(x.shape[:-count]) == 1:
            # XLA's compiler for CPUs draws a weight's reshape into such a product, which then takes six times as long.
            return _times_one_row(x, weight, count)
        return ops.einsum(equation, x, weight)

    @ops.custom_gradient
    def multiply(x, weight):
        kernel = axes.gather(ops.cast(weight, x.dtype), axes.axes_of(variable))

        def gradient(upstream):
            with in_gradient_of(variable):
                of_x = ops.einsum(f"{result},{right}->{left}", upstream, ops.cast(kernel, dtype))
                of_weight = ops.einsum(
                    f"{left},{result}->{right}", widen(x), widen(upstream))
            return ops.cast(of_x, x.dtype), ops.cast(axes.scatter(of_weight, axes.axes_of(variable)), weight.dtype)

        return ops.einsum(equation, ops.cast(x, dtype), ops.cast(kernel, dtype)), gradient

    return multiply(x, ops.cast(variable, variable.dtype))


def _is_matmul(left, right, result):
    """Whether the terms are those of `matmul`, whose gradients TensorFlow computes without transposed copies.

    As einsums, the products of 128 experts took twice as long, and those of tied logits 1.2 times.
    """
    return right[-2] == left[-1] and result == left[:-1] + right[-1] and right[:-2] in ("", left[:-2])


def _num_contracted(left, right, result):
    """How many axes, last of the left and first of the right term, are summed over; 0 where they lie otherwise."""
    count = sum(index in left for index in right)
    return count if right[:count] == left[-count:] and result == left[:-count] + right[count:] else 0


def _times_one_row(x, weight, count):
    """The product of one row, over the last `count` axes of x and the first of the weight, as a sum of products."""
    width = math.prod(weight.shape[:count])
    summed = ops.sum(widen(ops.reshape(x, (width, 1))) * widen(ops.reshape(weight, (width, -1))), axis=0)
    return ops.reshape(ops.cast(summed, x.dtype), (*x.shape[:-count], *weight.shape[count:]))


@contextlib.contextmanager
def in_gradient_of(variable):
    """Names operations as autodiff would for the layer of a weight, so that a compiler's words say where they are from.
    """
    with contextlib.ExitStack() as stack:
        for part in ("gradient_tape", *variable.path.split("/")[:-1]):
            stack.enter_context(keras.name_scope(part))
        yield
