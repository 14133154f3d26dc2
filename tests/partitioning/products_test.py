"""Products with weights: the einsum that they say, and no transposed copies of stacked kernels."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from switch_tf import partitioning

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
            product = partitioning.product(equation, x, weight)
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
