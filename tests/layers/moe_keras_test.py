"""Switch layers in Keras: losses, functional models, dtype policy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import SwitchFeedForward
from tests.layers.switch_layers import D_FF, D_MODEL, make_attention, make_inputs, make_layer, switch_attention


@pytest.mark.parametrize("make", [make_layer, make_attention])
def test_calling_adds_the_weighted_losses_of_each_router_and_forward_adds_none(make):
    layer = make(load_balancing_loss_weight=0.25, router_z_loss_weight=0.125)
    x, mask = make_inputs()
    outputs, stats = layer.forward(x, padding_mask=mask)
    routers = [stats] if make is make_layer else stats
    assert layer.losses == []
    np.testing.assert_array_equal(layer(x, padding_mask=mask), outputs)
    expected = [0.25 * each.load_balancing_loss.value + 0.125 * each.router_z_loss.value for each in routers]
    np.testing.assert_allclose(layer.losses, expected)
    assert len(set(map(float, expected))) == len(routers) and layer.losses[0].dtype == tf.float32
    assert routers[0].router_z_loss.value > 0.1


@pytest.mark.slow  # arguments_test.py has what a layer is rebuilt from, tests/models how a model is fit
@pytest.mark.parametrize("make, jit_compile", [(SwitchFeedForward, "auto"), (switch_attention, False)])
def test_in_a_functional_model_it_trains_saves_and_loads(make, jit_compile, tmp_path):
    keras.utils.set_random_seed(0)
    inputs, is_real = keras.Input((6, D_MODEL)), keras.Input((6,), dtype="bool")
    layer = make(3, d_ff=D_FF, num_groups_multiple=5, load_balancing_loss_weight=0.5, expert_dropout_rate=0.1)
    model = keras.Model([inputs, is_real], keras.layers.Dense(1)(inputs + layer(inputs, padding_mask=is_real)))
    assert model.output_shape == (None, 6, 1)
    # Batches of 5, 5 and 2 sequences, so Keras traces an unknown batch; the last one's 12 tokens are filled up to 15.
    x, mask = make_inputs(12, 6)
    y = x.sum(-1, keepdims=True)
    model.compile(keras.optimizers.Adam(1e-2), loss="mse", jit_compile=jit_compile)
    before = [weight.numpy() for weight in layer.weights]
    losses = model.fit([x, mask], y, batch_size=5, epochs=15, verbose=0).history["loss"]
    # What fit minimises contains the balance loss, which is never far below 0.5 * 1.
    assert losses[0] > losses[-1] > 0.3
    for weight, start in zip(layer.weights, before, strict=True):
        assert np.abs(weight.numpy() - start).max() > 1e-3, weight.path
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [weight.path for weight in loaded.weights] == [weight.path for weight in model.weights]
    few = [x[:7], mask[:7]]
    predicted = model.predict(few, verbose=0)
    np.testing.assert_array_equal(loaded.predict(few, verbose=0), predicted)
    np.testing.assert_allclose(predicted, model(few), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loaded.evaluate([x, mask], y, verbose=0), model.evaluate([x, mask], y, verbose=0))
    loaded([x, mask])
    assert len(loaded.losses) == len(layer.losses) and loaded.losses[0] > 0.3


def test_under_bfloat16_the_router_and_the_losses_stay_float32():
    layer = make_layer(dtype="mixed_bfloat16", eval_capacity_factor=3.0)
    x = tf.cast(make_inputs()[0], tf.bfloat16)
    outputs, stats = layer.forward(x)
    assert outputs.dtype == tf.bfloat16
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    assert all(mean.total.dtype == tf.float32 for mean in stats)
    # The router's statistics are exactly those of a float32 layer on the same inputs, the outputs within rounding.
    expected, expected_stats = make_layer(eval_capacity_factor=3.0).forward(tf.cast(x, tf.float32))
    for mine, theirs in zip(stats, expected_stats, strict=True):
        np.testing.assert_array_equal(mine.total, theirs.total)
    np.testing.assert_allclose(tf.cast(outputs, tf.float32), expected, rtol=0.05, atol=0.1)
    layer(x)
    assert layer.losses[0].dtype == tf.float32


def test_forward_builds_an_unbuilt_layer():
    outputs, stats = SwitchFeedForward(2, 3).forward(make_inputs()[0])
    assert outputs.shape == (2, 6, D_MODEL) and stats.expert_load.total.shape == (2,)


def test_forward_hands_symbolic_statistics_to_a_functional_model():
    inputs = keras.Input((6, 8))
    outputs, stats = SwitchFeedForward(2, 4, min_expert_capacity=1).forward(inputs)
    model = keras.Model(inputs, [outputs, stats.router_entropy.total, stats.router_entropy.weight])
    values, _, weight = model(np.ones((3, 6, 8), "float32"))
    assert values.shape == (3, 6, 8)
    assert outputs.shape == (None, 6, 8)
    assert float(weight) == 18
