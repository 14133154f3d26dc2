"""Recomputing in the backward pass changes neither values nor gradients."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.layers import Dropout
from switch_tf.ops import forms, random


def run(use_remat, is_compiled, dropout, x, mask, in_parts=False):
    """Value and gradient of sum(dropout(x)^2 where mask); the gradient is taken after the scopes were left."""
    calls = []

    def function(x, mask):
        calls.append(None)
        return tf.where(mask, dropout(x, training=True), 0.0) ** 2, (x + 1,)

    def forward_and_gradient(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with random.random_seed(tf.constant(5)), partitioning.part_of_batch(2 if in_parts else 1, 1):
                value, (other,) = forms.rematerialize(function, x, mask) if use_remat else function(x, mask)
            loss = tf.reduce_sum(value) + tf.reduce_sum(other)
        return value, tape.gradient(loss, x)

    compiled = tf.function(forward_and_gradient) if is_compiled else forward_and_gradient
    value, gradient = compiled(x, mask)
    return value.numpy(), gradient.numpy(), len(calls)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_values_and_gradients_are_the_same_with_dropout(is_compiled, in_parts):
    dropout = Dropout(0.5, name="dropout")
    x = tf.constant(np.random.RandomState(0).randn(4, 8).astype("float32"))
    mask = tf.constant(np.arange(32).reshape(4, 8) % 3 != 0)
    value, gradient, calls = run(False, is_compiled, dropout, x, mask, in_parts)
    remat_value, remat_gradient, remat_calls = run(True, is_compiled, dropout, x, mask, in_parts)
    np.testing.assert_array_equal(remat_value, value)
    np.testing.assert_array_equal(remat_gradient, gradient)
    # Some elements were dropped and some masked: there the gradient is only the 1 of the second result.
    assert 0.2 < np.mean(gradient == 1) < 0.9
    assert (calls, remat_calls) == (1, 2)


def test_gradients_reach_the_weights_inside():
    weight = tf.Variable([2.0, 3.0])
    x = tf.constant([1.0, -1.0])
    with tf.GradientTape() as tape:
        # sum of (w x)^2: gradient 2 w x^2 = [4, 6]
        loss = tf.reduce_sum(forms.rematerialize(lambda x: (weight * x) ** 2, x))
    np.testing.assert_array_equal(tape.gradient(loss, weight), [4.0, 6.0])


def test_arguments_may_be_nests():
    x, first, second = (tf.Variable([value]) for value in (2.0, 3.0, 5.0))
    with tf.GradientTape() as tape:
        value = forms.rematerialize(lambda x, pair, mask: tf.where(mask, x * pair[0] * pair[1] ** 2, 0.0),
                                                x, (first, second), tf.constant([True]))
    assert [float(gradient[0]) for gradient in tape.gradient(value, [x, first, second])] == [75.0, 50.0, 60.0]
