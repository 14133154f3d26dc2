"""Operations by index: by hand, and the same in the form for one device and in the form for many."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from switch_tf import partitioning
from switch_tf.ops import forms, indexing


@pytest.fixture(params=["one device", "tokens on many", "vocabulary on many"])
def form(request, monkeypatch):
    """As if the code ran on one device, or were one program for many, without cutting anything."""
    monkeypatch.setattr(indexing, "is_partitioned", lambda: request.param != "one device")
    monkeypatch.setattr(indexing, "is_split", lambda axis: request.param == "vocabulary on many")
    monkeypatch.setattr(indexing, "prefers_products", lambda: request.param != "one device")


def test_counts_are_of_each_group(form):
    index = tf.constant([[0, 2, 2, 3], [3, 3, 3, 3]])
    counts = indexing.count_into_bins(index, 4)
    np.testing.assert_array_equal(counts, [[1, 0, 2, 1], [0, 0, 0, 4]])
    assert counts.dtype == tf.int32


def test_a_row_of_a_table_gets_the_gradients_of_all_places_where_it_was_looked_up(form):
    table = partitioning.add_weight(layers.Layer(), "table", (4, 2), ("vocab", "embed"), "zeros")
    table.assign([[0, 1], [2, 3], [4, 5], [6, 7]])
    with tf.GradientTape() as tape:
        rows = indexing.look_up(table, tf.constant([[1, 3], [1, 0]]), "float32")
    np.testing.assert_array_equal(rows, [[[2, 3], [6, 7]], [[2, 3], [0, 1]]])
    upstream = tf.constant([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]])
    np.testing.assert_array_equal(tape.gradient(rows, table.value, upstream), [[7, 8], [6, 8], [0, 0], [3, 4]])


def test_a_row_of_logits_has_a_normalizer_a_target_and_the_place_of_the_first_largest(form):
    logits = tf.math.log([[[1.0, 2, 5], [4, 3, 3], [1, 4, 4]]])
    normalizer, target, place = indexing.normalizers_and_targets(logits, tf.constant([[1, 0, 2]]))
    np.testing.assert_allclose(np.exp(normalizer), [[8, 10, 9]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(target), [[2, 4, 4]], rtol=1e-6)
    np.testing.assert_array_equal(place, [[2, 0, 1]])
    assert place.dtype == tf.int32


@pytest.mark.parametrize("device, is_partitioned, expected", [
    ("CPU", False, ("ragged", "index", "einsum")), ("GPU", False, ("index", "einsum")),
    ("TPU", False, ("einsum", "index")), ("CPU", True, ("einsum",))])
def test_dispatches_suit_the_devices(device, is_partitioned, expected, monkeypatch):
    monkeypatch.setattr(forms, "device_type", lambda: device)
    monkeypatch.setattr(forms, "is_partitioned", lambda: is_partitioned)
    assert forms.suited_dispatches() == expected


@pytest.mark.parametrize("axis", [1, 2])
def test_one_place_is_written_in_either_form(fusing, axis):
    x = np.arange(24.0).reshape(2, 3, 4).astype("float32")
    expected = x.copy()
    place = (slice(None),) * axis + (2,)
    expected[place] = -1
    entry = -np.ones_like(np.take(x, [2], axis))

    def write(x, entry, position):
        return indexing.write(x, entry, position, axis)

    for is_xlas in (False, True):
        program = tf.function(lambda *values, is_xlas=is_xlas: forms.fused(write, values, is_xlas))
        np.testing.assert_array_equal(program(x, entry, 2), expected)
