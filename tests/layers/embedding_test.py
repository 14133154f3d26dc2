"""The embedding with its dense gradient, and logits with and without it."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import LogitsDense, TokenEmbedding
from tests.layers.switch_layers import built


def make_embedding(table, **kwargs):
    return built(TokenEmbedding(*np.shape(table), **kwargs), None, table)


# Hand-worked values.


def test_rows_are_looked_up_unscaled():
    layer = make_embedding([[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(layer(np.array([[2, 0], [1, 1]])), [[[5, 6], [1, 2]], [[3, 4], [3, 4]]])


def test_tied_logits_are_products_with_the_rows():
    # (1, 10) with (1, 2), (3, 4), (5, 6): 1 + 20, 3 + 40, 5 + 60; nothing is scaled here.
    logits = make_embedding([[1, 2], [3, 4], [5, 6]]).attend(tf.constant([[[1.0, 10.0]]]))
    np.testing.assert_array_equal(logits, [[[21, 43, 65]]])


def test_untied_logits_are_products_with_the_columns():
    layer = built(LogitsDense(2), 2, [[1, 2], [3, 4]])
    # (1, 10): 1 + 30, 2 + 40
    np.testing.assert_array_equal(layer(tf.constant([[[1.0, 10.0]]])), [[[31, 42]]])


def test_the_gradient_of_a_repeated_token_adds_up():
    layer = make_embedding(np.zeros((4, 2)))
    with tf.GradientTape() as tape:
        outputs = layer(tf.constant([[1, 3, 1]]))
        # Weights 1, 10, 100 for the three places: row 1 gets 1 + 100, row 3 gets 10.
        total = tf.reduce_sum(outputs * tf.constant([[[1.0], [10.0], [100.0]]]))
    gradient = tape.gradient(total, layer.embedding.value)
    assert isinstance(gradient, tf.Tensor) and not isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(gradient, [[0, 0], [101, 101], [0, 0], [10, 10]])


# Equivalence.


@pytest.mark.parametrize("is_compiled", [False, True])
def test_values_and_gradient_are_those_of_a_product_with_one_hots(is_compiled):
    rng = np.random.RandomState(0)
    layer = make_embedding(rng.randn(11, 5))
    ids, weights = tf.constant(rng.randint(0, 11, (3, 20))), rng.randn(3, 20, 5).astype("float32")

    def run(look_up):
        def gradient():
            with tf.GradientTape() as tape:
                outputs = look_up()
                total = tf.reduce_sum(tf.tanh(outputs) * weights)
            return outputs, tape.gradient(total, layer.embedding.value)

        return (tf.function(gradient) if is_compiled else gradient)()

    outputs, gradient = run(lambda: layer(ids))
    expected, expected_gradient = run(lambda: tf.one_hot(ids, 11) @ layer.embedding.value)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(outputs, expected)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


def test_a_table_used_twice_gets_one_dense_gradient():
    rng = np.random.RandomState(1)
    layer = make_embedding(rng.randn(5, 3))
    ids = tf.constant([[0, 2, 2]])
    with tf.GradientTape(persistent=True) as tape:
        tied = tf.reduce_sum(layer.attend(layer(ids)) ** 2)
        one_hot = tf.one_hot(ids, 5) @ layer.embedding.value
        expected = tf.reduce_sum((one_hot @ tf.transpose(layer.embedding.value)) ** 2)
    gradient = tape.gradient(tied, layer.embedding.value)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_allclose(gradient, tape.gradient(expected, layer.embedding.value), rtol=1e-4)


# Dtype policy.


@pytest.fixture(params=["tied", "untied"])
def to_logits(request):
    """A function of a table [vocab, d_model] to the function of hidden states to logits of a bfloat16 model."""

    def make(table):
        if request.param == "tied":
            return make_embedding(table, dtype="mixed_bfloat16").attend
        return built(LogitsDense(len(table), dtype="mixed_bfloat16"), table.shape[1], np.transpose(table))

    return make


def test_under_bfloat16_logits_are_not_rounded(to_logits):
    # 32 * 1 + 1 * i/16; from 32 on bfloat16s are 1/4 apart, which would make two or four of them the largest.
    steps = np.arange(8) / 16
    logits = to_logits(np.stack([np.ones(8), steps], axis=1))(tf.constant([[[32.0, 1.0]]], tf.bfloat16))
    assert logits.dtype == tf.float32
    np.testing.assert_array_equal(logits, [[32 + steps]])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_under_bfloat16_logits_err_as_float32_sums_of_bfloat16_products_do(to_logits, is_compiled):
    rng = np.random.RandomState(0)
    hidden, table = (tf.cast(4 * rng.randn(*shape), tf.bfloat16) for shape in ((2, 5, 64), (300, 64)))
    run = to_logits(tf.cast(table, tf.float32).numpy())
    logits = tf.function(run, jit_compile=True)(hidden) if is_compiled else run(hidden)
    exact = np.einsum("blm,vm->blv", *(tf.cast(x, tf.float64).numpy() for x in (hidden, table)))
    assert np.abs(exact).max() > 400
    # 64 terms of about 16, each sum rounded to 24 bits; bfloat16's rounding alone errs by 1 at 400.
    np.testing.assert_allclose(logits, exact, rtol=0, atol=5e-4)
    assert len(np.unique(logits)) > 0.99 * logits.shape.num_elements()


def test_under_bfloat16_the_gradient_adds_up_in_float32():
    # 300 times 1 is 256 in a bfloat16 running sum.
    layer = make_embedding(np.zeros((2, 1)), dtype="mixed_bfloat16")
    with tf.GradientTape() as tape:
        embedded = layer(tf.ones((1, 300), tf.int32))
        total = tf.reduce_sum(tf.cast(embedded, tf.float32))
    assert embedded.dtype == tf.bfloat16
    gradient = tape.gradient(total, layer.embedding.value)
    assert gradient.dtype == tf.float32
    np.testing.assert_array_equal(gradient, [[0], [300]])
