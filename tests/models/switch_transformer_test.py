"""The whole model: logits, statistics, random numbers, gradients, precision."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.layers import Dropout, ExpertFeedForward, Router
from switch_tf.ops import random
from tests.layers.switch_layers import in_parts
from tests.models.conftest import BOTH, ENOUGH, SHALLOW


def gradients_of(model, features, is_compiled=False, seed=0):
    """Loss (with both router losses), gradients of every weight, in training with dropout from one seed."""

    def run():
        with random.random_seed(seed), tf.GradientTape() as tape:
            logits, router_stats = model.forward(features, training=True)
            loss = tf.reduce_mean(tf.square(logits))
            for stats in router_stats:
                loss += 0.5 * stats.load_balancing_loss.value + 0.1 * stats.router_z_loss.value
            # Inside the scope, as the training step does.
            return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    return (tf.function(run, autograph=False) if is_compiled else run)()


def check_gradients(model, mine, theirs, rtol=1e-5):
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5)
    for variable, first, second in zip(model.trainable_variables, mine[1], theirs[1], strict=True):
        largest = np.abs(second).max()
        np.testing.assert_allclose(first, second, rtol=rtol, atol=rtol * largest, err_msg=variable.path)


# Hand-worked values.


@pytest.mark.parametrize("scale, factor", [(None, 0.5), (True, 0.5), (False, 1.0)])
def test_tied_logits_of_layers_that_add_nothing(scale, factor):
    config = SwitchConfig(vocab_size=3, d_model=4, d_ff=2, d_kv=2, num_heads=1, num_encoder_layers=1,
                          num_decoder_layers=0, dropout_rate=0.0, layer_norm_epsilon=1e-12, scale_decoder_outputs=scale)
    model = SwitchTransformer(config)
    model.build()
    for weight in model.weights:
        if weight.name in ("out", "wo"):
            weight.assign(np.zeros(weight.shape))
    model.token_embedder.embedding.assign([[0, 0, 0, 1], [4, 0, 0, 0], [1, 1, 1, 1]])
    # Token 1: (4, 0, 0, 0) over its root mean square 2 is (2, 0, 0, 0); token 2 is its own norm. Times 4^-1/2, or not,
    # then with each row: 2 * (0, 4, 1) and (1, 4, 4).
    logits = model({"encoder_input_tokens": np.array([[1, 2]])})
    np.testing.assert_allclose(logits, factor * np.array([[[0, 8, 2], [1, 4, 4]]]), atol=1e-6)


@pytest.mark.parametrize("scale, factor", [(None, 1.0), (True, 0.25), (False, 1.0)])
def test_untied_logits_have_a_kernel_of_their_own(make_model, features, scale, factor):
    model = make_model(is_sparse=False, logits_via_embedding=False, num_decoder_layers=0, scale_decoder_outputs=scale)
    is_real = features["encoder_input_tokens"] != 0
    embedded = model.token_embedder(features["encoder_input_tokens"])
    hidden, _ = model.encoder(embedded, is_real, is_real[:, None, None])
    # d_model is 16: the scale is 1/4
    expected = factor * hidden.numpy() @ model.logits_dense.kernel.numpy()
    np.testing.assert_allclose(model(features), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize("num_decoder_layers, length", [(2, 6), (0, 8)])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_logits_are_float32_for_every_position_and_word(make_model, features, num_decoder_layers, length, dtype):
    model = make_model(dtype, num_decoder_layers=num_decoder_layers)
    logits, router_stats = model.forward(features)
    assert logits.shape == (3, length, 32) and logits.dtype == tf.float32
    assert len(router_stats) == len(model.config.sparse_layer_names) == (2 if num_decoder_layers else 1)
    assert np.isfinite(logits).all() and logits.numpy().std() > 0.1


def test_an_encoder_alone_needs_no_decoder_features(make_model, features):
    model = make_model(num_decoder_layers=0)
    assert model.decoder is None
    alone = {"encoder_input_tokens": features["encoder_input_tokens"]}
    np.testing.assert_array_equal(model(alone), model(features))


def test_router_statistics_count_real_tokens_of_their_stack(make_model, features):
    encoder, decoder = make_model().forward(features)[1]
    assert encoder.expert_load.weight == 8 + 5 + 3 and decoder.expert_load.weight == 6 + 4 + 1


# Random numbers.


def test_every_random_stream_has_a_path_of_its_own(make_model):
    model = make_model(dropout_rate=0.1)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, Dropout | Router | ExpertFeedForward)]
    paths = [layer.path for layer in layers]
    # A stack has 2 dropouts, 3 (encoder) or 5 (decoder) per layer, 1 per feed-forward or expert layer, and 1 router.
    assert len(paths) == (2 + 2 * 4 + 1) + (2 + 2 * 6 + 1)
    assert len(set(paths)) == len(paths)
    assert all(path.startswith(("switch_transformer/encoder/", "switch_transformer/decoder/")) for path in paths)


def test_training_draws_by_seed_and_evaluation_never(make_model, features):
    model = make_model(dropout_rate=0.2, jitter_noise=0.1, expert_dropout_rate=0.2, **SHALLOW)
    logits = {}
    for seed in (0, 0, 1):
        with random.random_seed(seed):
            again = model.forward(features, training=True)[0].numpy()
        assert seed not in logits or np.array_equal(again, logits[seed])
        logits[seed] = again
    assert not np.array_equal(logits[0], logits[1])
    first, second = model(features, training=True), model(features, training=True)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(model(features), model(features))


def test_parts_of_the_batch_add_up_to_the_whole(make_model, features):
    model = make_model(dropout_rate=0.2, jitter_noise=0.1, expert_dropout_rate=0.2, num_groups_multiple=2,
                       train_capacity_factor=0.9, **SHALLOW)
    batch = {name: np.concatenate([value, value[:1]]) for name, value in features.items()}
    with random.random_seed(7):
        whole, stats = model.forward(batch, training=True)
        parts = in_parts(2, lambda index: model.forward(
            {name: value[2 * index:2 * index + 2] for name, value in batch.items()}, training=True))
    np.testing.assert_allclose(np.concatenate([logits for logits, _ in parts]), whole, rtol=1e-4, atol=1e-5)
    for layer, mine in enumerate(stats):
        merged = parts[0][1][layer].merge(parts[1][1][layer])
        for name, first, second in zip(mine._fields, merged, mine, strict=True):
            np.testing.assert_allclose(first.total, second.total, rtol=1e-4, atol=1e-5, err_msg=name)


# Gradients.


@pytest.mark.parametrize("overrides", [
    {"activation": "geglu", "logits_via_embedding": False, **ENOUGH}, {**BOTH, **ENOUGH},
    {"activation": "geglu", **BOTH, **ENOUGH}, {"extra_mlp": True, "dropout_rate": 0.1}], ids=str)
def test_every_weight_gets_a_dense_gradient_without_router_losses(make_model, features, overrides):
    model = make_model(**overrides)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model.forward(features, training=True)[0]))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert isinstance(gradient, tf.Tensor), variable.path
        assert gradient.shape == variable.shape and np.abs(gradient).max() > 0, variable.path


NOISY = {"dropout_rate": 0.2, "jitter_noise": 0.2, "expert_dropout_rate": 0.3, "train_capacity_factor": 0.9}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rematerialisation_changes_nothing(make_model, features, is_compiled):
    depth = SHALLOW if is_compiled else {"num_encoder_layers": 1}
    kept, recomputed = (make_model(remat=remat, **NOISY, **depth) for remat in (False, True))
    check_gradients(kept, gradients_of(recomputed, features, is_compiled), gradients_of(kept, features))
    np.testing.assert_array_equal(recomputed(features), kept(features))


def test_rematerialisation_without_a_seed_uses_the_same_numbers_twice(make_model, features):
    # As in Keras' fit: the seed comes from Keras' generator, and the gradient is taken outside of any scope.
    gradients = []
    for remat in (False, True):
        model = make_model(remat=remat, **NOISY, **SHALLOW)
        keras.utils.set_random_seed(5)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True))) + tf.add_n(model.losses)
        gradients.append((loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])))
    check_gradients(model, *gradients)


@pytest.mark.parametrize("is_known, num_features", [(True, 3), (False, 2)], ids=["lengths known", "without targets"])
def test_an_unknown_batch_gives_the_same_logits(make_model, features, is_known, num_features):
    model = make_model(num_groups_multiple=8, **SHALLOW)
    features = dict(list(features.items())[:num_features])
    signature = {name: tf.TensorSpec([None, value.shape[1] if is_known else None], tf.int32)
                 for name, value in features.items()}
    # Once as users trace it, with autograph, which takes as long again.
    dynamic = tf.function(lambda features: model(features), input_signature=[signature], autograph=not is_known)
    for size in (3, 1):
        rows = {name: value[:size] for name, value in features.items()}
        np.testing.assert_allclose(dynamic(rows), model(rows), rtol=1e-4, atol=1e-5)


# Dtype policy.


def test_under_bfloat16_weights_gradients_and_losses_are_float32(make_model, features):
    model, exact = (make_model(dtype, is_sparse=False) for dtype in ("mixed_bfloat16", "float32"))
    assert {variable.dtype for variable in model.variables} == {"float32"}
    _, gradients = gradients_of(model, features)
    assert {gradient.dtype for gradient in gradients} == {tf.float32}
    assert model.token_embedder(features["encoder_input_tokens"]).dtype == tf.bfloat16
    difference = np.abs(model(features) - exact(features)).max()
    # bfloat16 has 8 bits: differences, but small ones against logits of standard deviation about 1.
    assert 1e-4 < difference < 0.1 * np.std(exact(features))
    _, router_stats = make_model("mixed_bfloat16").forward(features)
    assert all(mean.total.dtype == mean.weight.dtype == tf.float32 for stats in router_stats for mean in stats)


# Refusals.


@pytest.mark.parametrize("name", ["encoder_input_tokens", "decoder_input_tokens"])
def test_a_missing_feature_is_named(make_model, features, name):
    del features[name]
    message = rf"The model needs the feature '{name}' \(<int32>\[batch, length\]\); it was given \[.*\]\. seqio's"
    with pytest.raises(ValueError, match=message):
        make_model()(features)


def test_a_training_batch_that_cannot_be_cut_is_refused(make_model, features):
    with pytest.raises(ValueError, match=r"divides 24 tokens \(3 sequences of 8\) .* Use a batch of 2 or 4 seq"):
        make_model(num_groups_multiple=16).forward(features, training=True)
