"""Router statistics in the history of `fit`, compared with those that `forward` returns."""

import keras
import numpy as np
import pytest

from switch_tf.callbacks import RouterStatistics
from switch_tf.layers import SwitchFeedForward

SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}


def test_an_epoch_has_the_means_over_its_batches_and_layers(fresh_model):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 32, (4, 6)).astype("int32")
    ids[0, 2:] = 0  # fewer tokens in the first batch than in the second
    features = {"encoder_input_tokens": ids, "decoder_input_tokens": ids[::-1].copy()}
    model = fresh_model(**SHALLOW, train_capacity_factor=0.5)
    # Nothing is learnt, so that `forward` sees the same weights.
    model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=False, steps_per_execution=2)
    history = model.fit(features, ids, batch_size=2, shuffle=False, verbose=0,
                        callbacks=[RouterStatistics(per_layer=True)]).history
    assert model.router_observer is None
    merged = None
    for rows in (slice(0, 2), slice(2, 4)):
        _, stats = model.forward({name: value[rows] for name, value in features.items()}, training=True)
        merged = stats if merged is None else [one.merge(other) for one, other in zip(merged, stats, strict=True)]
    for statistic in ("fraction_tokens_dropped", "router_entropy", "expert_usage", "load_balancing_loss"):
        values = [float(getattr(stats, statistic).value) for stats in merged]
        np.testing.assert_allclose(history[f"router/{statistic}"], [np.mean(values)], rtol=1e-5)
        for layer, value in zip(("encoder", "decoder"), values, strict=True):
            np.testing.assert_allclose(history[f"router/{layer}/layers_0/{statistic}"], [value], rtol=1e-5)
    assert history["router/fraction_tokens_dropped"][0] > 0.1
    assert history["router/dead_experts"] == [sum(int(stats.dead_experts) for stats in merged)]


def test_a_layer_in_a_functional_model_is_observed_in_bfloat16_with_xla():
    inputs = keras.Input((4, 8), dtype="bfloat16")
    layer = SwitchFeedForward(64, 4, jitter_noise=0.0, dtype="mixed_bfloat16")
    model = keras.Model(inputs, inputs + layer(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=True)
    # 3,000 tokens: sums in bfloat16 would stop at 256.
    x = np.random.default_rng(0).normal(size=(750, 4, 8)).astype("float32")
    history = model.fit(x, x, batch_size=25, verbose=0, callbacks=[RouterStatistics()]).history
    _, stats = layer.forward(x)
    assert float(stats.router_entropy.weight) == 3000
    np.testing.assert_allclose(history["router/router_entropy"], [float(stats.router_entropy.value)], rtol=1e-3)
    np.testing.assert_allclose(history["router/router_confidence"], [float(stats.router_confidence.value)], rtol=1e-3)
    assert history["router/dead_experts"] == [int(stats.dead_experts)]


def test_a_model_without_experts_is_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="RouterStatistics needs a model with experts"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[RouterStatistics()])
