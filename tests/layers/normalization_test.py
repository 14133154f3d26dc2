"""RMS norm: no mean, no bias, statistics in float32."""

import numpy as np
import tensorflow as tf

from switch_tf.layers import RMSNorm


def test_it_divides_by_the_root_mean_square_and_scales():
    norm = RMSNorm(epsilon=0.5)
    norm.build((1, 2))
    norm.scale.assign([1, 10])
    # Mean square (9 + 16) / 2 + 0.5 = 13; the mean is not subtracted.
    np.testing.assert_allclose(norm(np.array([[3.0, -4.0]], "float32")), [[3 / 13**0.5, -40 / 13**0.5]], rtol=1e-6)


def test_it_is_numpys_in_float64_for_any_rank():
    x = np.random.RandomState(0).randn(2, 3, 5, 7).astype("float32")
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(RMSNorm()(x), expected, rtol=1e-6)


def test_the_scale_of_the_inputs_does_not_matter_and_zeros_stay_zero():
    x = np.random.RandomState(0).randn(4, 16).astype("float32")
    np.testing.assert_allclose(RMSNorm()(1000 * x), RMSNorm()(x), rtol=1e-4)
    np.testing.assert_array_equal(RMSNorm()(np.zeros((1, 4), "float32")), np.zeros((1, 4)))


def test_under_bfloat16_the_statistics_are_float32():
    norm = RMSNorm(dtype="mixed_bfloat16")
    # 1024 squares of 3: a bfloat16 sum would stall long before 9216. Result exactly 3 / 3.
    outputs = norm(tf.fill((1, 1024), tf.constant(3.0, tf.bfloat16)))
    assert outputs.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(outputs, tf.float32), np.ones((1, 1024)))
    # Rounded once, at the exit: also where neither the inverse root nor the scale is a bfloat16.
    norm.scale.assign(np.full(1024, 1.003))
    x = tf.cast(np.random.RandomState(0).randn(8, 1024), tf.bfloat16)
    x64 = tf.cast(x, tf.float64).numpy()
    expected = x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + 1e-6) * np.float32(1.003)
    np.testing.assert_array_equal(norm(x), tf.cast(tf.cast(expected, tf.float32), tf.bfloat16))


def test_the_gradient_is_the_finite_difference():
    norm = RMSNorm()
    x, weights = (tf.constant(np.random.RandomState(seed).randn(1, 5).astype("float32")) for seed in (0, 1))
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(norm(x) * weights)

    def f(x):
        return np.sum(x / np.sqrt(np.mean(x**2) + 1e-6) * weights.numpy())

    x64 = x.numpy().astype(np.float64)
    expected = [(f(x64 + 1e-6 * e) - f(x64 - 1e-6 * e)) / 2e-6 for e in np.eye(5)]
    np.testing.assert_allclose(tape.gradient(total, x)[0], expected, atol=1e-5)
