"""A GPU's programs multiply bfloat16 numbers as such, with the results of TensorFlow's own program."""

import re

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from switch_tf.hardware import devices
from switch_tf.partitioning import lowering
from switch_tf.partitioning.layout import Layout

_PRODUCT = re.compile(r"stablehlo\.dot(?:_general)? .* : "
                      r"\(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\) -> tensor<[\dx]*(\w+)>")
NARROW, WIDE = ("bf16", "bf16", "f32"), ("f32", "f32", "f32")


def _lower(function, arrays, kind="GPU"):
    specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
    with devices.supposed(kind, "of a test"):
        return lowering.lower(function, specs, [])


def _products(program):
    """Returns the types of the operands and of the result of each matrix product."""
    return _PRODUCT.findall(lowering.text(program.module))


def _run(program, arrays):
    """Runs a lowered function on this machine's CPU."""
    layout = Layout("data=1")
    sharding = NamedSharding(lowering.device_mesh(layout, jax.devices("cpu")[:1]), PartitionSpec())
    inputs = [jax.device_put(array, sharding) for array in arrays]
    results = lowering.jit(program, inputs)(*inputs)
    return [np.asarray(result, np.float64) for result in results]


def _numbers(*shape, seed=0, dtype="bfloat16"):
    return tf.cast(np.random.RandomState(seed).randn(*shape), dtype).numpy()


def _wide(x):
    return tf.cast(x, tf.float32)


A, B = _numbers(4, 8, 16), _numbers(4, 16, 8, seed=1)
IDS = np.array([[3, 0, 5], [5, 5, 1]], np.int32)
# Name -> a function with one product, and its arguments.
FUNCTIONS = {
    "cast": (lambda a, b: tf.matmul(_wide(a), _wide(b)), (A, B)),
    "cast and moved": (lambda a, b: tf.einsum("bqhd,bkhd->bhqk", _wide(a), _wide(b)),
                       (_numbers(2, 5, 3, 4), _numbers(2, 6, 3, 4, seed=1))),
    "cast, cut and turned": (lambda a, b: tf.matmul(_wide(a)[:, 2:6], tf.transpose(_wide(b)[:, :8], (0, 2, 1)),
                                                    transpose_b=True), (A[..., :8], B)),
    "one-hot": (lambda ids, x: tf.einsum("blv,bld->vd", _wide(ids[..., None] == tf.range(6)), _wide(x)),
                (IDS, _numbers(2, 3, 4))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_was_cast_is_multiplied_as_it_was(name):
    function, arrays = FUNCTIONS[name]
    program = _lower(function, arrays)
    assert _products(program) == [NARROW] and _products(_lower(function, arrays, "TPU")) == [WIDE]
    (found,) = _run(program, arrays)
    # TensorFlow computes the function itself, in float32.
    np.testing.assert_allclose(found, function(*map(tf.constant, arrays)).numpy(), rtol=2e-6, atol=2e-6)


OTHERS = {
    "float32": (lambda a, b: tf.matmul(a, b), (A.astype("float32"), B.astype("float32"))),
    "one of two": (lambda a, b: tf.matmul(_wide(a), b), (A, B.astype("float32"))),
    "computed after the cast": (lambda a, b: tf.matmul(1.001 * _wide(a), _wide(b)), (A, B)),
    "numbers of int32": (lambda ids, x: tf.matmul(tf.cast(ids, tf.float32), _wide(x)),
                         (np.arange(6, dtype=np.int32).reshape(2, 3), _numbers(3, 4))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_stay_as_they_are(name):
    function, arrays = OTHERS[name]
    assert _products(_lower(function, arrays)) == [WIDE]


def test_a_product_of_bfloat16_keeps_its_rounded_result():
    assert _products(_lower(lambda a, b: tf.matmul(a, b), (A, B))) == [("bf16", "bf16", "bf16")]


def test_sums_are_those_of_float32():
    """A sum that bfloat16 would round at every step."""
    ones = np.ones((1, 4096)).astype(A.dtype)
    program = _lower(lambda a, b: tf.matmul(_wide(a), _wide(b)), (ones, ones.T))
    assert _products(program) == [NARROW] and _run(program, (ones, ones.T))[0].tolist() == [[4096.0]]
