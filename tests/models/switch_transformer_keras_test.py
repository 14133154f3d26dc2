"""The whole model by plain Keras habits: losses, compile, fit, evaluate, save, load."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, context
from tests.models.conftest import SHALLOW


def test_calling_adds_the_weighted_losses_and_forward_adds_none(make_model, features):
    model = make_model(load_balancing_loss_weight=0.25, router_z_loss_weight=0.125)
    logits, router_stats = model.forward(features)
    assert model.losses == []
    np.testing.assert_array_equal(model(features), logits)
    expected = [0.25 * stats.load_balancing_loss.value + 0.125 * stats.router_z_loss.value for stats in router_stats]
    np.testing.assert_allclose(model.losses, expected, rtol=1e-6)
    model.forward(features)
    assert model.losses == []


def compile_model(model):
    # Not compiled by XLA, to save the tests' time.
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  weighted_metrics=["sparse_categorical_accuracy"], jit_compile=False)


def saved_and_loaded(model, features, folder):
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert isinstance(loaded, SwitchTransformer) and loaded.config == model.config
    assert loaded.dtype_policy.name == model.dtype_policy.name
    for mine, theirs in zip(loaded.variables, model.variables, strict=True):
        assert (mine.path, mine.dtype, mine.logical_axes) == (theirs.path, theirs.dtype, theirs.logical_axes)
    np.testing.assert_array_equal(loaded(features), model(features))
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_it_fits_and_what_it_learnt_is_saved(fresh_model, features, tmp_path, remat):
    keras.utils.set_random_seed(0)
    model = fresh_model("mixed_bfloat16", dropout_rate=0.1, num_groups_multiple=2, remat=remat, **SHALLOW)
    compile_model(model)
    # In one trace, not two; users need not.
    model.optimizer.build(model.trainable_variables)
    targets = features["decoder_target_tokens"]
    # Batches of 2 and of 1, so Keras traces an unknown batch.
    history = model.fit(features, targets, sample_weight=(targets != 0).astype("float32"), batch_size=2, epochs=10,
                        verbose=0).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert saved_and_loaded(model, features, tmp_path).optimizer.iterations == 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_it_evaluates_saves_and_loads(fresh_model, features, tmp_path, dtype):
    model = fresh_model(dtype, num_groups_multiple=2, semantics="mtf", scale_decoder_outputs=False, **SHALLOW)
    compile_model(model)
    targets, weights = features["decoder_target_tokens"], (features["decoder_target_tokens"] != 0).astype("float32")
    evaluated = model.evaluate(features, targets, sample_weight=weights, verbose=0)
    again = saved_and_loaded(model, features, tmp_path).evaluate(features, targets, sample_weight=weights, verbose=0)
    np.testing.assert_allclose(again, evaluated, rtol=1e-5)


def test_fit_minimises_the_router_losses_too(fresh_model, features):
    model = fresh_model(load_balancing_loss_weight=100.0, router_z_loss_weight=0.0, eval_capacity_factor=4.0)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    loss = model.evaluate(features, features["decoder_target_tokens"], verbose=0)
    with context.within(no_drop=True):
        logits, router_stats = model.forward(features)
    expected = sum(100 * float(stats.load_balancing_loss.value) for stats in router_stats)
    logits = np.asarray(logits, np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected += -np.log(np.take_along_axis(probs, features["decoder_target_tokens"][..., None], -1)).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


@pytest.mark.parametrize("jit_compile", [False, pytest.param("auto", marks=pytest.mark.slow)])
def test_rows_of_predictions_evaluations_and_exports_do_not_depend_on_the_batch(make_model, features, tmp_path,
                                                                               jit_compile):
    model = make_model(eval_capacity_factor=0.3, min_expert_capacity=1, load_balancing_loss_weight=0.0,
                       router_z_loss_weight=0.0)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit_compile)
    rows = [{name: value[[row]] for name, value in features.items()} for row in range(3)]
    predicted = model.predict(features, verbose=0)
    assert np.abs(predicted - model(features)).max() > 1e-2  # calls drop tokens
    np.testing.assert_allclose(predicted, np.concatenate([model.predict(row, verbose=0) for row in rows]), atol=1e-5)
    losses = [model.evaluate(some, some["decoder_target_tokens"], verbose=0) for some in (features, *rows)]
    assert losses[0] == pytest.approx(np.mean(losses[1:]), rel=1e-5)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    for some, expected in ((features, predicted), (rows[0], predicted[:1])):
        np.testing.assert_allclose(exported.serve(some), expected, atol=1e-5)


def test_its_config_is_json_and_makes_it_again(make_model):
    model = make_model("mixed_bfloat16", num_experts=3)
    config = json.loads(json.dumps(model.get_config()))
    again = SwitchTransformer.from_config(config)
    assert again.config == model.config and again.dtype_policy.name == "mixed_bfloat16"
