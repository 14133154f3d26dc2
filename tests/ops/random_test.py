"""Random numbers depend on the seed, the step, the layer and the element, and on nothing else."""

import zlib

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from switch_tf import context, partitioning
from switch_tf.ops import random

LIMIT = 2**32


def mix(x):
    """lowbias32 in Python's integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % LIMIT
    x = ((x ^ (x >> 15)) * 0x846CA68B) % LIMIT
    return x ^ (x >> 16)


def chi_square(samples, num_bins):
    """Sum of (observed - expected)^2 / expected over equal bins of [0, 1)."""
    counts, _ = np.histogram(samples, bins=num_bins, range=(0, 1))
    expected = len(samples) / num_bins
    return float(np.sum((counts - expected) ** 2) / expected)


def draw(seed, shape):
    return np.asarray(random.uniform(tf.constant(seed, tf.uint32), shape))


class Noise(keras.layers.Layer):
    def build(self, input_shape=None):
        pass

    def call(self, inputs):
        return random.uniform(random.layer_seed(self, "noise"), keras.ops.shape(inputs))


def test_every_number_is_the_hash_of_its_seed_and_place():
    numbers = draw(1234, (3, 2, 5))
    for row, column, depth in np.ndindex(3, 2, 5):
        # The row is the batch's; what remains, (column, depth), is place 5 * column + depth.
        key = mix(mix(row) ^ 1234)
        bits = mix((mix((5 * column + depth) ^ key) + 1234) % LIMIT)
        assert numbers[row, column, depth] == (bits >> 8) / 2**24


def test_single_elements_have_the_numbers_of_the_whole():
    whole = draw(7, (3, 2, 4))
    seed = tf.constant(7, tf.uint32)
    np.testing.assert_array_equal(random.uniform_at(seed, [2, 0, 1], [3, 7, 4]),
                                  [whole[2, 0, 3], whole[0, 1, 3], whole[1, 1, 0]])


def test_step_and_layer_seeds_are_hashes_of_what_they_name():
    assert int(random.step_seed(5, 9)) == mix(mix(5) ^ 9)
    assert int(random.step_seed(5, tf.constant(9, tf.int64))) == mix(mix(5) ^ 9)
    layer = Noise(name="one")
    layer.build()
    with random.random_seed(77):
        assert int(random.layer_seed(layer, "dropout")) == mix(77 ^ zlib.crc32(b"one/dropout"))


def test_numbers_are_in_0_to_1_with_24_bits():
    numbers = draw(3, (100, 1000))
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0 and numbers.max() < 1
    np.testing.assert_array_equal(numbers * 2**24, np.round(numbers * 2**24))
    assert numbers.min() < 1e-4 and numbers.max() > 1 - 1e-4


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_numbers_are_uniform(seed):
    # 63 degrees of freedom: mean 63, standard deviation sqrt(2 * 63) = 11.2; the bounds are 4 of them away.
    numbers = draw(seed, (64, 1024))
    assert 18 < chi_square(numbers.ravel(), 64) < 108
    # The same over one row, over one column, and over the first number of many steps.
    assert 18 < chi_square(draw(seed, (1, 65536)).ravel(), 64) < 108
    assert 18 < chi_square(draw(seed, (65536, 1)).ravel(), 64) < 108


def test_the_first_number_of_each_step_is_uniform():
    firsts = [float(draw(int(random.step_seed(0, step)), (1,))[0]) for step in range(200)]
    # 200 seeds, 9 degrees of freedom: the 99.99 % quantile is 33.7, the 0.01 % one 0.7.
    assert 0.7 < chi_square(np.array(firsts), 10) < 33.7


def test_neighbours_are_not_correlated():
    # The correlation of n independent pairs has standard deviation 1 / sqrt(n) = 1 / 256; bounds at 4 of them.
    bound = 4 / 256
    base = draw(1000, (256, 256))

    def correlation(a, b):
        return abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])

    for other in (draw(1001, (256, 256)), draw(1000 + 2**16, (256, 256)), draw(1000 ^ 2**31, (256, 256))):
        assert correlation(base, other) < bound
    assert correlation(base[1:], base[:-1]) < bound
    assert correlation(base[:, 1:], base[:, :-1]) < bound
    assert correlation(base, base.T) < bound
    steps = [draw(int(random.step_seed(0, step)), (256, 256)) for step in range(3)]
    assert correlation(steps[0], steps[1]) < bound and correlation(steps[1], steps[2]) < bound


def test_parts_draw_their_share_of_the_whole():
    parts = []
    for index in (0, tf.constant(1)):
        with partitioning.part_of_batch(2, index):
            parts.append(draw(11, (2, 4, 3)))
    np.testing.assert_array_equal(np.concatenate(parts), draw(11, (4, 4, 3)))


def test_compiled_and_with_unknown_shape_the_numbers_are_the_same():
    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32)])
    def traced(x):
        return random.uniform(tf.constant(5, tf.uint32), keras.ops.shape(x))

    np.testing.assert_array_equal(traced(np.zeros((3, 7), "float32")), draw(5, (3, 7)))


def test_streams_differ_by_layer_purpose_and_step():
    one, two = Noise(name="one"), Noise(name="two")
    x = np.zeros((4, 4), "float32")
    with random.random_seed(1):
        first, again, other = np.asarray(one(x)), np.asarray(one(x)), np.asarray(two(x))
        seeds = {int(random.layer_seed(one, purpose)) for purpose in ("dropout", "jitter")}
    with random.random_seed(2):
        next_step = np.asarray(one(x))
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other) and np.all(first != next_step)
    assert len(seeds) == 2


def test_a_seed_is_an_int_or_a_tensor():
    layer, x = Noise(name="one"), np.zeros((2, 2), "float32")
    outputs = []
    for seed in (9, tf.constant(9), tf.constant(9, tf.uint32), np.int64(9)):
        with random.random_seed(seed):
            outputs.append(np.asarray(layer(x)))
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])


def test_without_a_scope_keras_seed_decides():
    layer, x = Noise(name="one"), np.zeros((4, 4), "float32")
    keras.utils.set_random_seed(3)
    first, second = np.asarray(layer(x)), np.asarray(layer(x))
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(np.asarray(layer(x)), first)
    assert np.all(first != second)


def test_scopes_nest_and_are_left_after_an_error():
    with random.random_seed(1):
        with pytest.raises(KeyError), random.random_seed(2):
            raise KeyError
        assert context.current().seed == 1
        assert int(random.fresh_seed()) == 1
    assert context.current().seed is None


def test_each_initial_weight_is_the_hash_of_its_seed_and_place():
    numbers = random.RandomByPosition("uniform", 0.5, seed=1234).piece((3, 2, 5), (slice(None),) * 3)
    for row, column, depth in np.ndindex(3, 2, 5):
        key = mix(mix(row) ^ 1234)
        bits = mix((mix((5 * column + depth) ^ key) + 1234) % LIMIT) >> 8
        assert numbers[row, column, depth] == 0.5 * (2 * bits + 1 - 2**24) / 2**24


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
def test_pieces_of_a_weight_have_the_numbers_of_the_whole(distribution):
    initializer, shape = random.RandomByPosition(distribution, 2.0, seed=5), (5, 300, 400)  # more than a block
    whole = np.asarray(initializer(shape, "float32"))
    for index in ((slice(2, 4), slice(None), slice(None)), (slice(4, 5), slice(7, 9), slice(399, 400))):
        np.testing.assert_array_equal(initializer.piece(shape, index), whole[index])
    rows = np.random.RandomState(0).permutation(whole.reshape(-1))[:100_000] / 2
    reference = {"normal": scipy.stats.norm(), "truncated_normal": scipy.stats.truncnorm(-2, 2),
                 "uniform": scipy.stats.uniform(-1, 2)}[distribution]
    assert scipy.stats.kstest(rows, reference.cdf).pvalue > 0.001


def test_initializers_draw_seeds_from_pythons_generator_and_clones_draw_anew():
    def drawn():
        keras.utils.set_random_seed(3)
        first = random.RandomByPosition("normal", 1.0)
        return [np.asarray(initializer((4,))) for initializer in (first, first, first.clone())]

    first, again, clone = drawn()
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, clone)
    np.testing.assert_array_equal(drawn()[2], clone)
