"""Products of activations with weights."""

import contextlib
import math
from collections.abc import Callable, Iterator

import keras
from keras import ops

from switch_tf import context
from switch_tf.ops import forms
from switch_tf.ops.dtypes import widen
from switch_tf.partitioning import axes
from switch_tf.partitioning.tensors import Tensor

# Up to this many rows, a CPU product with a transposed weight is two to five times as fast if computed as the transpose
# of weight @ rows^T.
_FEW_ROWS = 32
# Numbers in a part of `_times_rows_of`'s table: for one row, for several that each read the part, and for more.
_NUMBERS_READ_ONCE = 2**21
_NUMBERS_READ_AGAIN = 2**18
_NUMBERS_COPIED = 2**20
_ROWS_TO_READ_AGAIN = 4
_AT_ONCE = 8  # products in one sum of `multiply_in_blocks`
_LARGE = 2**19  # numbers of the smallest matrix to multiply one row with in blocks


def product(equation: str, x: Tensor, variable: keras.Variable, dtype: str | None = None) -> Tensor:
    """Returns `einsum(equation, x, weight)`, with the weight in the dtype of `x`.

    In a program cut over devices the weight's gradient is a float32 product. Autodiff would compute and sum it in
    bfloat16.

    Args:
        equation: Such as "blm,mf->blf", each index in two or three terms.
        dtype: Of the result, by default of `x`. "float32" keeps the sums of bfloat16 products, and the gradients,
            unrounded.
    """
    terms, result = equation.split("->")
    left, right = terms.split(",")
    dtype = dtype or x.dtype
    if forms.is_fused():
        return _multiply_few_rows(left, right, result, x, variable, dtype)
    # Widens both operands: TensorFlow multiplies bfloat16 to float32 only in XLA, and Keras not at all on JAX. A TPU's
    # compiler removes the casts (docs/notebook/numerics.md).
    if not axes.is_partitioned():
        x, weight = ops.cast(x, dtype), ops.cast(axes.use(variable, x.dtype), dtype)
        if _is_matmul(left, right, result):
            return ops.matmul(x, weight)
        if len(right) == 2 and _is_matmul(left, right[::-1], result):
            # With an unknown batch size, a decoding step: one position of each sequence.
            if x.shape[-2] is not None and math.prod(length or 1 for length in x.shape[:-1]) <= _FEW_ROWS:
                rows = ops.transpose(ops.reshape(x, (-1, x.shape[-1])))
                return ops.reshape(ops.transpose(ops.matmul(weight, rows)), (*ops.shape(x)[:-1], weight.shape[0]))
            return ops.matmul(x, ops.transpose(weight))
        return ops.einsum(equation, x, weight)

    @ops.custom_gradient
    def multiply(x, weight):
        kernel = axes.gather(ops.cast(weight, x.dtype), axes.axes_of(variable))

        def gradient(upstream):
            with name_gradient_of(variable):
                of_x = ops.einsum(f"{result},{right}->{left}", upstream, ops.cast(kernel, dtype))
                of_weight = ops.einsum(f"{left},{result}->{right}", widen(x), widen(upstream))
            return ops.cast(of_x, x.dtype), ops.cast(axes.scatter(of_weight, axes.axes_of(variable)), weight.dtype)

        return ops.einsum(equation, ops.cast(x, dtype), ops.cast(kernel, dtype)), gradient

    return multiply(x, ops.cast(variable, variable.dtype))


def _is_matmul(left, right, result):
    """Returns whether it is a `matmul`: its gradients in TensorFlow need no transposed copies.

    As einsums the products of 128 experts took twice as long, and tied logits 1.2 times.
    """
    return right[-2] == left[-1] and result == left[:-1] + right[-1] and right[:-2] in ("", left[:-2])


def _multiply_few_rows(left, right, result, x, variable, dtype):
    count = sum(index in left for index in right)
    is_matrix = right[:count] == left[-count:] and result == left[:-count] + right[count:]
    shape = (math.prod(variable.shape[:count]), -1) if is_matrix else variable.shape
    # Outside the loops of the program. In a loop XLA would fuse the reshape or cast with the product of each step,
    # number by number.
    graph, shared = context.current().fused_program
    key = id(variable), x.dtype, dtype
    if key not in shared:
        with graph.as_default():
            shared[key] = ops.reshape(ops.cast(axes.use(variable, x.dtype), dtype), shape)
    weight = shared[key]
    x = ops.cast(x, dtype)
    if is_matrix:
        rows = ops.reshape(x, (-1, weight.shape[0]))
        # XLA multiplies one row with a matrix in a single thread.
        products = (ops.matmul(rows, weight) if rows.shape[0] > 1 or math.prod(weight.shape) < _LARGE else
                    multiply_in_blocks(rows, weight[None], lambda part: part))
        return ops.reshape(products, (*x.shape[:-count], *variable.shape[count:]))
    if len(right) == 2 and _is_matmul(left, right[::-1], result):
        products = _times_rows_of(weight, ops.reshape(x, (-1, x.shape[-1])))
        return ops.reshape(products, (*x.shape[:-1], weight.shape[0]))
    return ops.einsum(f"{left},{right}->{result}", x, weight)


def multiply_in_blocks(rows: Tensor, weights: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiplies [row, k] with [matrix, k, n] in a program of XLA, as a sum of sums of a few products.

    XLA fuses a few products with the lookup, and computes many columns at once in all threads. A matrix product would
    copy the matrices; a sum of all would go column by column. `choose` maps a part of the weights, [matrix, places, n],
    to each row's part, [row, places, n].
    """
    num_matrices, width, num_columns = weights.shape
    at_once = math.gcd(width, _AT_ONCE)
    weights = ops.reshape(weights, (num_matrices, width // at_once, at_once, num_columns))
    blocks = ops.reshape(rows, (-1, width // at_once, at_once))
    summed = sum(widen(blocks[:, :, place, None]) * widen(ops.cast(choose(weights[:, :, place]), rows.dtype))
                 for place in range(at_once))
    return ops.cast(ops.sum(summed, axis=1), rows.dtype)


def _times_rows_of(table, x):
    """Multiplies [row, k] with the transpose of the table [n, k], one part of the table at a time.

    A product with a vector reads its part in place, in all threads, and the next row of `x` finds it in the cache.
    XLA's matrix products copy the part first, and are faster for many rows.
    """
    (num_rows, width), length = x.shape, table.shape[0]
    is_by_row = num_rows <= _ROWS_TO_READ_AGAIN
    numbers = _NUMBERS_READ_ONCE if num_rows == 1 else _NUMBERS_READ_AGAIN if is_by_row else _NUMBERS_COPIED
    at_a_time = min(max(1, numbers // width), length)
    columns = ops.unstack(x, num_rows) if is_by_row else [ops.transpose(x)]

    def step(index, *products):
        # The last part may overlap the previous one.
        start = ops.minimum(index * at_a_time, length - at_a_time)
        part = ops.slice(table, (start, 0), (at_a_time, width))
        return index + 1, *(ops.slice_update(result, (start, 0)[:len(result.shape)], ops.matmul(part, column))
                            for result, column in zip(products, columns, strict=True))

    num_parts = -(-length // at_a_time)
    start = ops.convert_to_tensor(0, "int32"), *(ops.zeros((length, *column.shape[1:]), x.dtype) for column in columns)
    _, *products = ops.while_loop(lambda index, *_: index < num_parts, step, start)
    return ops.stack(products) if is_by_row else ops.transpose(products[0])


@contextlib.contextmanager
def name_gradient_of(variable: keras.Variable) -> Iterator[None]:
    """Names operations like autodiff's for the weight's layer, to show their origin in compiled programs."""
    with contextlib.ExitStack() as stack:
        for part in ("gradient_tape", *variable.path.split("/")[:-1]):
            stack.enter_context(keras.name_scope(part))
        yield
