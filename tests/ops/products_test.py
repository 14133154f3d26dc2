"""Products with weights: the einsum that they say, and no transposed copies of stacked kernels."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from switch_tf import context, partitioning
from switch_tf.ops import forms, products
from switch_tf.partitioning.layout import Layout

EQUATIONS = ("blm,mf->blf", "blm,mhd->blhd", "bqhd,hdm->bqm", "erm,emf->erf", "gsm,me->gse", "blm,vm->blv")
SIZES = dict(zip("blmfhdqergsv", (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13), strict=True))


def make(equation, seed=0):
    terms, result = equation.split("->")
    left, right = terms.split(",")
    random = np.random.RandomState(seed)
    x, kernel, upstream = (random.randn(*(SIZES[index] for index in term)) for term in (left, right, result))
    weight = partitioning.add_weight(layers.Layer(), "kernel", kernel.shape, (None,) * kernel.ndim, "zeros")
    weight.assign(kernel)
    return (left, right, result), (x, kernel, upstream), weight


def gradients(equation, x, weight, upstream):
    x, upstream = tf.constant(x, tf.float32), tf.constant(upstream, tf.float32)

    @tf.function(autograph=False)
    def compute():
        with tf.GradientTape() as tape:
            tape.watch(x)
            product = products.product(equation, x, weight)
        return product, *tape.gradient(product, [x, weight.value], output_gradients=upstream)

    return compute.get_concrete_function()


def operation_types(*arguments):
    return {operation.type for operation in gradients(*arguments).graph.get_operations()}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_product_is_its_einsum_and_so_are_its_gradients(equation):
    (left, right, result), (x, kernel, upstream), weight = make(equation)
    product, of_x, of_weight = gradients(equation, x, weight, upstream)()
    np.testing.assert_allclose(product, np.einsum(equation, x, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, np.einsum(f"{result},{right}->{left}", upstream, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_weight, np.einsum(f"{left},{result}->{right}", x, upstream), rtol=1e-5, atol=1e-5)


def test_stacked_kernels_are_multiplied_where_they_lie():
    # TensorFlow's Einsum would transpose 128 experts' kernels, twice as long as the products (docs/benchmarks.md).
    _, (x, _, upstream), weight = make("erm,emf->erf")
    operations = operation_types("erm,emf->erf", x, weight, upstream)
    assert "BatchMatMulV2" in operations
    assert not operations & {"Einsum", "Transpose"}


def test_a_tied_table_is_multiplied_as_one_matrix():
    # Not sequence by sequence, with a sum of as many gradients of the whole table.
    _, (x, _, upstream), weight = make("blm,vm->blv")
    operations = operation_types("blm,vm->blv", x, weight, upstream)
    assert "MatMul" in operations
    assert not operations & {"BatchMatMulV2", "Einsum", "Sum"}


class Uncut:
    """As if the program were for many devices, without cutting anything."""

    layout = Layout()

    def constrain(self, x, axes):
        return x

    gather = scatter = constrain

    def replicate(self, x):
        return x


@pytest.mark.parametrize("annotator", [None, Uncut()], ids=["one device", "many devices"])
@pytest.mark.parametrize("equation", ["blm,vm->blv", "blm,mv->blv"])
def test_a_wider_product_rounds_neither_its_sums_nor_the_gradients_that_come_back(annotator, equation):
    # 32 + 1/16 and 1 + 1/1024 are not bfloat16s: the nearest are 32 and 1.
    weight = partitioning.add_weight(layers.Layer(), "kernel", (2, 2), (None, None), "zeros")
    weight.assign([[1.0, 0.0625], [1.0, 0.0]] if equation == "blm,vm->blv" else [[1.0, 1.0], [0.0625, 0.0]])
    x = tf.constant([[[32.0, 1.0]], [[-32.0, 1.0]]], tf.bfloat16)
    upstream = tf.constant([[[1 + 2**-10, -1.0]], [[1.0, -1.0]]])
    with context.within(annotator=annotator), tf.GradientTape() as tape:
        tape.watch(x)
        product = products.product(equation, x, weight, "float32")
        of_x, of_weight = tape.gradient(product, [x, weight.value], output_gradients=upstream)
    np.testing.assert_array_equal(product, [[[32.0625, 32.0]], [[-31.9375, -32.0]]])
    assert (product.dtype, of_x.dtype, of_weight.dtype) == (tf.float32, tf.bfloat16, tf.float32)
    # The second place of x: (1 + 2^-10) / 16; the first of the weight's first row: 32 (1 + 2^-10) - 32 = 2^-5.
    np.testing.assert_array_equal(tf.cast(of_x, tf.float32)[..., 0], [[2**-10], [0.0]])
    of_weight = of_weight if equation == "blm,vm->blv" else tf.transpose(of_weight)
    np.testing.assert_array_equal(of_weight[:, 0], [2**-5, 0.0])


# In programs of XLA's for few rows.


def in_a_loop(equation, x, weight, dtype=None):
    """The product in the second step of a loop, of a program that is XLA's."""
    def step(x):
        def turn(index, _):
            return index + 1, products.product(equation, x, weight, dtype)

        blank = tf.zeros_like(products.product(equation, x, weight, dtype))
        return tf.while_loop(lambda index, _: index < 2, turn, (0, blank))[1]

    return tf.function(lambda x: forms.fused(step, (x,), True), autograph=False)


@pytest.mark.parametrize("equation, rows", [
    (equation, rows) for equation in EQUATIONS for rows in ((1, 1), (3, 1), (2, 3))
    if equation != "erm,emf->erf" or rows == (1, 1)])  # experts have a size of their own
@pytest.mark.parametrize("is_large", [False, True])
def test_a_product_in_a_loop_of_xlas_is_its_einsum_with_the_weight_as_it_is(
        fusing, monkeypatch, equation, is_large, rows):
    monkeypatch.setattr(products, "_LARGE", 1 if is_large else 2**19)
    # Two rows of a table at a time: 13 of them are six parts and a half.
    for name in ("_NUMBERS_READ_ONCE", "_NUMBERS_READ_AGAIN", "_NUMBERS_COPIED"):
        monkeypatch.setattr(products, name, 2 * SIZES["m"] + 1)
    _, (x, kernel, _), weight = make(equation)
    if equation != "erm,emf->erf":
        x = x[:rows[0], :rows[1]]
    program = in_a_loop(equation, x, weight)
    for factor in (1, -2):
        weight.assign(factor * kernel)
        found = program(tf.constant(x, tf.float32))
        np.testing.assert_allclose(found, np.einsum(equation, x, factor * kernel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3, 6])
@pytest.mark.parametrize("equation", ["blm,vm->blv", "blm,mv->blv"])
def test_a_wider_product_of_few_rows_rounds_the_weight_alone(fusing, equation, num_rows):
    # As above; 1 + 1/512, which is no bfloat16, is rounded to 1.
    weight = partitioning.add_weight(layers.Layer(), "kernel", (2, 2), (None, None), "zeros")
    values = np.array([[1.0, 0.0625], [1 + 2**-9, 0.0]])
    weight.assign(values if equation == "blm,vm->blv" else values.T)
    x = tf.constant([[[32.0, 1.0]]] * num_rows, tf.bfloat16)
    found = in_a_loop(equation, x, weight, "float32")(x)
    np.testing.assert_array_equal(found, [[[32.0625, 32.0]]] * num_rows)
