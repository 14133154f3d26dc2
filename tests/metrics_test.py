"""Means are sums until they are divided, so they merge exactly."""

import json

import keras
import numpy as np
import tensorflow as tf

from switch_tf import metrics
from switch_tf.metrics import Mean, Measurements, RouterStats, StepMeasurements


def stats(offset):
    return RouterStats(*(Mean(np.float32(offset + i), np.float32(1 + i)) for i in range(len(RouterStats._fields))))


def test_a_mean_is_its_total_over_its_weight():
    assert Mean(tf.constant(3.0), tf.constant(4.0)).value == 0.75
    np.testing.assert_array_equal(Mean(tf.constant([2.0, 1.0]), tf.constant(4.0)).value, [0.5, 0.25])


def test_merging_is_not_the_mean_of_means():
    # (1 + 9) / (1 + 3) = 2.5, not (1 / 1 + 9 / 3) / 2 = 2
    merged = Mean(1.0, 1.0).merge(Mean(9.0, 3.0))
    assert merged == Mean(10.0, 4.0)
    assert merged.value == 2.5


def test_the_mean_of_nothing_is_0():
    assert Mean(tf.constant(0.0), tf.constant(0.0)).value == 0
    np.testing.assert_array_equal(Mean(tf.zeros(2), tf.constant(0.0)).value, [0, 0])


def test_router_statistics_merge_field_by_field():
    merged = stats(0).merge(stats(10))
    for i, mean in enumerate(merged):
        # (0 + i) + (10 + i) over (1 + i) + (1 + i)
        assert mean == Mean(10 + 2 * i, 2 + 2 * i)


def step(offset):
    """Returns measurements of a step with two sparse layers that are not in alphabetical order."""
    terms = {"z_loss": Mean(np.float32(offset), np.float32(4)), "cross_entropy": Mean(np.float32(1 / 3), np.float32(4))}
    load = Mean(np.float32([offset, 0.25]), np.float32(2))
    routers = {layer: stats(offset)._replace(expert_load=load) for layer in ("encoder/layers_1", "decoder/layers_1")}
    return StepMeasurements(Measurements(terms, Mean(np.float32(1), np.float32(4)), routers),
                            *(Mean(np.float32(total), np.float32(1)) for total in (30, 2, 5)))


def test_a_tree_of_means_merges_mean_by_mean_and_keeps_its_form_and_order():
    merged = metrics.merge(step(1), step(2))
    assert isinstance(merged, StepMeasurements) and isinstance(merged.batch, Measurements)
    assert merged.batch.loss_terms["z_loss"] == Mean(3, 8)
    assert list(merged.batch.loss_terms) == ["z_loss", "cross_entropy"]
    assert list(merged.batch.routers) == ["encoder/layers_1", "decoder/layers_1"]
    np.testing.assert_array_equal(merged.batch.routers["decoder/layers_1"].expert_load.total, [3, 0.5])
    assert merged.batch.routers["encoder/layers_1"].router_z_loss == stats(1).merge(stats(2)).router_z_loss
    assert merged.tokens == Mean(60, 2)


def test_nothing_and_a_tree_merge_to_that_tree():
    assert metrics.merge(None, step(1)).tokens == Mean(30, 1)


def test_all_results_of_a_function_are_one_vector_and_on_the_host_in_float64():
    results = metrics.Vector()

    @tf.function
    def function(total):
        return results.join((tf.constant(-1), {"tokens": Mean(total, tf.constant(1.0))}, (), tf.constant([[1], [0]])))

    vector = function(tf.constant([2.0**24, 0.5]))
    assert (vector.shape, vector.dtype) == ((6,), tf.float32)
    index, means, nothing, flags = results.split(vector)
    assert (index, nothing, flags.tolist()) == (-1, (), [[1], [0]])
    assert means["tokens"].total.tolist() == [2.0**24, 0.5] and means["tokens"].weight.dtype == np.float64
    # 2^24 + 1 does not fit into float32: sums over steps go on in float64.
    assert means["tokens"].merge(Mean(1.0, 0.0)).total[0] == 2**24 + 1


def test_a_tree_survives_json_exactly():
    sums = metrics.merge(*(keras.tree.map_structure(np.float64, step(number)) for number in (1, 2)))
    back = metrics.from_json(json.loads(json.dumps(metrics.to_json(sums))))
    assert keras.tree.map_structure(np.ndarray.tolist, back) == keras.tree.map_structure(lambda x: x.tolist(), sums)
    assert list(back.batch.routers) == list(sums.batch.routers)
    assert isinstance(back.batch.routers["encoder/layers_1"], RouterStats)
