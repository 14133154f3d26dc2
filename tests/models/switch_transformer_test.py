"""The whole model: logits, masks, causality, packing, gradients, precision, and plain Keras habits."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer, partitioning
from switch_tf.layers import Dropout, ExpertFeedForward, Router

ENOUGH = {"train_capacity_factor": 4.0, "eval_capacity_factor": 4.0}


def gradients_of(model, features, is_compiled=False, seed=0):
    """Loss (with both router losses), gradients of every weight, in training with dropout from one seed."""

    def run():
        with partitioning.random_seed(seed), tf.GradientTape() as tape:
            logits, router_stats = model.forward(features, training=True)
            loss = tf.reduce_mean(tf.square(logits))
            for stats in router_stats:
                loss += 0.5 * stats.load_balancing_loss.value + 0.1 * stats.router_z_loss.value
            # Inside the scope, as the training step does.
            return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    return (tf.function(run) if is_compiled else run)()


def check_gradients(model, mine, theirs, rtol=1e-5):
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5)
    for variable, first, second in zip(model.trainable_variables, mine[1], theirs[1], strict=True):
        largest = np.abs(second).max()
        np.testing.assert_allclose(first, second, rtol=rtol, atol=rtol * largest, err_msg=variable.path)


def packed_and_apart():
    """Two examples in one row of 9 inputs and 8 targets, and the same in two rows."""
    rng = np.random.RandomState(4)
    inputs, targets = [rng.randint(1, 32, n) for n in (4, 3)], [rng.randint(1, 32, n) for n in (3, 4)]
    shifted = [np.concatenate([[0], target[:-1]]) for target in targets]

    def row(parts, length):
        joined = np.concatenate(parts)
        return np.pad(joined, (0, length - len(joined)))[None].astype("int32")

    segments = [[np.full(len(part), i + 1) for i, part in enumerate(parts)] for parts in (inputs, targets)]
    packed = {
        "encoder_input_tokens": row(inputs, 9), "encoder_segment_ids": row(segments[0], 9),
        "decoder_input_tokens": row(shifted, 8), "decoder_target_tokens": row(targets, 8),
        "decoder_segment_ids": row(segments[1], 8)}
    apart = {
        "encoder_input_tokens": np.concatenate([row([part], 9) for part in inputs]),
        "decoder_input_tokens": np.concatenate([row([part], 8) for part in shifted]),
        "decoder_target_tokens": np.concatenate([row([part], 8) for part in targets])}
    return packed, apart


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


def test_router_statistics_are_in_the_order_of_the_layers_names(fresh_model, features):
    model = fresh_model(encoder_sparse_step=1, decoder_sparse_step=2)
    names = ["encoder/layers_0", "encoder/layers_1", "decoder/layers_1"]
    assert list(model.config.sparse_layer_names) == names
    for i, name in enumerate(names):
        stack, layer = name.split("/")
        router = getattr(model, stack).layers[int(layer[-1])].mlp.router
        kernel = router.kernel.numpy()
        router.kernel.assign(np.zeros_like(kernel))
        _, router_stats = model.forward(features)
        router.kernel.assign(kernel)
        # A router of zeros has the entropy ln 4, exactly that one.
        is_even = [abs(float(stats.router_entropy.value) - np.log(4)) < 1e-6 for stats in router_stats]
        assert is_even == [j == i for j in range(3)]


def test_router_statistics_count_real_tokens_of_their_stack(make_model, features):
    encoder, decoder = make_model().forward(features)[1]
    assert encoder.expert_load.weight == 8 + 5 + 3 and decoder.expert_load.weight == 6 + 4 + 1


# Invariants: causality, padding, packing.


@pytest.mark.parametrize("overrides", [
    {"is_sparse": False}, {"eval_capacity_factor": 0.6}, {"eval_capacity_factor": 0.6, "num_groups_multiple": 2},
], ids=str)
def test_a_later_target_never_changes_an_earlier_logit(make_model, features, overrides):
    # One sequence: top-1 routing in order is causal inside of one, and only there.
    model = make_model(**overrides)
    one = {name: features[name][:1] for name in ("encoder_input_tokens", "decoder_input_tokens")}
    logits, router_stats = model.forward(one)
    assert not router_stats or router_stats[1].fraction_tokens_dropped.total > 0
    for position in range(1, 6):
        changed = one["decoder_input_tokens"].copy()
        changed[:, position:] = (changed[:, position:] + 7) % 32
        again = model({**one, "decoder_input_tokens": changed}).numpy()
        np.testing.assert_allclose(again[:, :position], logits[:, :position], rtol=1e-5, atol=1e-5)
        assert np.abs(again[:, position] - logits[:, position]).max() > 1e-3


def test_every_position_sees_the_whole_input(make_model, features):
    model = make_model(is_sparse=False)
    logits = model(features).numpy()
    changed = features["encoder_input_tokens"].copy()
    changed[0, -1] = changed[0, -1] % 31 + 1
    difference = np.abs(model({**features, "encoder_input_tokens": changed}).numpy() - logits).max(-1)
    assert (difference[0] > 1e-4).all() and (difference[1:] == 0).all()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_packed_examples_are_the_same_as_apart(make_model, is_sparse):
    model = make_model(is_sparse=is_sparse, **ENOUGH)
    packed, apart = packed_and_apart()
    logits, expected = model(packed).numpy(), model(apart).numpy()
    np.testing.assert_allclose(logits[0, :3], expected[0, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[0, 3:7], expected[1, :4], rtol=1e-4, atol=1e-5)


def test_packed_examples_do_not_see_each_other(make_model):
    model = make_model(is_sparse=False)
    packed, _ = packed_and_apart()
    logits = model(packed).numpy()
    for name, of_second in (("encoder_input_tokens", slice(4, 7)), ("decoder_input_tokens", slice(3, 7))):
        changed = {**packed, name: packed[name].copy()}
        changed[name][:, of_second] = changed[name][:, of_second] % 31 + 1
        again = model(changed).numpy()
        np.testing.assert_array_equal(again[:, :3], logits[:, :3])
        assert (np.abs(again - logits)[0, 3:7].max(-1) > 1e-4).all()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_what_padding_holds_does_not_matter(make_model, is_sparse):
    # Few slots, so that padding would push real tokens out.
    model = make_model(is_sparse=is_sparse, eval_capacity_factor=0.7)
    packed, _ = packed_and_apart()
    logits = model(packed).numpy()
    changed = {name: packed[name].copy() for name in packed}
    changed["encoder_input_tokens"][:, 7:] = 9
    changed["decoder_input_tokens"][:, 7:] = 9
    np.testing.assert_array_equal(model(changed).numpy()[:, :7], logits[:, :7])


@pytest.mark.parametrize("is_sparse", [False, True])
def test_more_padding_does_not_matter(make_model, features, is_sparse):
    model = make_model(is_sparse=is_sparse, **ENOUGH)
    longer = {name: np.pad(value, ((0, 0), (0, 5))) for name, value in features.items()}
    is_real = features["decoder_target_tokens"] != 0
    np.testing.assert_allclose(
        model(longer).numpy()[:, :6][is_real], model(features).numpy()[is_real], rtol=1e-4, atol=1e-5)


def test_masks_come_from_segments_before_tokens(make_model, features):
    # A real token 0 (here in the middle) is padding without segments and none with them.
    model = make_model(is_sparse=False)
    tokens = features["encoder_input_tokens"].copy()
    tokens[0, 3] = 0
    with_zero = {**features, "encoder_input_tokens": tokens}
    with_segments = {**with_zero, "encoder_segment_ids": (features["encoder_input_tokens"] != 0).astype("int32")}
    assert np.abs(model(with_zero) - model(with_segments)).max() > 1e-3


# Random numbers.


def test_every_random_stream_has_a_path_of_its_own(make_model):
    model = make_model(dropout_rate=0.1)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, Dropout | Router | ExpertFeedForward)]
    paths = [layer.path for layer in layers]
    # A stack: 2 dropouts of its own, for each layer 3 (encoder) or 5 (decoder) and 1 in its feed-forward, whose place
    # the experts take in the sparse one; 1 router.
    assert len(paths) == (2 + 2 * 4 + 1) + (2 + 2 * 6 + 1)
    assert len(set(paths)) == len(paths)
    assert all(path.startswith(("switch_transformer/encoder/", "switch_transformer/decoder/")) for path in paths)


def test_training_draws_by_seed_and_evaluation_never(make_model, features):
    model = make_model(dropout_rate=0.2, jitter_noise=0.1, expert_dropout_rate=0.2)
    logits = {}
    for seed in (0, 0, 1):
        with partitioning.random_seed(seed):
            again = model.forward(features, training=True)[0].numpy()
        assert seed not in logits or np.array_equal(again, logits[seed])
        logits[seed] = again
    assert not np.array_equal(logits[0], logits[1])
    first, second = model(features, training=True), model(features, training=True)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(model(features), model(features))


def test_parts_of_the_batch_add_up_to_the_whole(make_model, features):
    model = make_model(dropout_rate=0.2, jitter_noise=0.1, expert_dropout_rate=0.2, num_groups_multiple=2,
                       train_capacity_factor=0.9)
    batch = {name: np.concatenate([value, value[:1]]) for name, value in features.items()}
    with partitioning.random_seed(7):
        whole, stats = model.forward(batch, training=True)
        parts = []
        for index in range(2):
            with partitioning.part_of_batch(2, index):
                parts.append(model.forward(
                    {name: value[2 * index:2 * index + 2] for name, value in batch.items()}, training=True))
    np.testing.assert_allclose(np.concatenate([logits for logits, _ in parts]), whole, rtol=1e-4, atol=1e-5)
    for layer, mine in enumerate(stats):
        merged = parts[0][1][layer].merge(parts[1][1][layer])
        for name, first, second in zip(mine._fields, merged, mine, strict=True):
            np.testing.assert_allclose(first.total, second.total, rtol=1e-4, atol=1e-5, err_msg=name)


# Gradients.


def test_every_weight_gets_a_dense_gradient(make_model, features):
    model = make_model(activation="geglu", logits_via_embedding=False, **ENOUGH)
    _, gradients = gradients_of(model, features)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert isinstance(gradient, tf.Tensor), variable.path
        assert gradient.shape == variable.shape and np.abs(gradient).max() > 0, variable.path


NOISY = {"dropout_rate": 0.2, "jitter_noise": 0.2, "expert_dropout_rate": 0.3, "train_capacity_factor": 0.9}
# One sparse layer a stack: tracing is what takes time.
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rematerialisation_changes_nothing(make_model, features, is_compiled):
    kept, recomputed = (make_model(remat=remat, **NOISY, **(SHALLOW if is_compiled else {})) for remat in (False, True))
    check_gradients(kept, gradients_of(recomputed, features, is_compiled), gradients_of(kept, features))
    np.testing.assert_array_equal(recomputed(features), kept(features))


def test_rematerialisation_without_a_seed_uses_the_same_numbers_twice(make_model, features):
    # As under Keras' fit: the seed comes from Keras' generator, and the gradient is taken outside of any scope.
    gradients = []
    for remat in (False, True):
        model = make_model(remat=remat, **NOISY)
        keras.utils.set_random_seed(5)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True))) + tf.add_n(model.losses)
        gradients.append((loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])))
    check_gradients(model, *gradients)


def test_einsum_and_index_dispatch_have_the_same_gradients(make_model, features):
    first, second = (make_model(dispatch=way, **NOISY) for way in ("einsum", "index"))
    check_gradients(first, gradients_of(first, features), gradients_of(second, features))


def test_an_unknown_batch_gives_the_same_logits(make_model, features):
    model = make_model(num_groups_multiple=8)
    signature = {name: tf.TensorSpec([None, value.shape[1]], tf.int32) for name, value in features.items()}
    dynamic = tf.function(lambda features: model(features), input_signature=[signature])
    for size in (3, 1):
        rows = {name: value[:size] for name, value in features.items()}
        np.testing.assert_allclose(dynamic(rows), model(rows), rtol=1e-4, atol=1e-5)


# Dtype policy.


def test_under_bfloat16_weights_gradients_and_losses_are_float32(make_model, features):
    model, exact = (make_model(dtype, is_sparse=False) for dtype in ("mixed_bfloat16", "float32"))
    assert {variable.dtype for variable in model.variables} == {"float32"}
    _, gradients = gradients_of(model, features)
    assert {gradient.dtype for gradient in gradients} == {tf.float32}
    difference = np.abs(model(features) - exact(features)).max()
    # bfloat16 has 8 bits: differences, but small ones against logits of standard deviation about 1.
    assert 1e-4 < difference < 0.1 * np.std(exact(features))
    _, router_stats = make_model("mixed_bfloat16").forward(features)
    assert all(mean.total.dtype == mean.weight.dtype == tf.float32 for stats in router_stats for mean in stats)


def test_under_bfloat16_activations_are_bfloat16(make_model, features):
    model = make_model("mixed_bfloat16")
    is_real = features["encoder_input_tokens"] != 0
    embedded = model.token_embedder(features["encoder_input_tokens"])
    hidden, _ = model.encoder(embedded, is_real, is_real[:, None, None])
    assert embedded.dtype == hidden.dtype == tf.bfloat16


# Keras: losses, compile, fit, evaluate, save, load.


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
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, SwitchTransformer) and loaded.config == model.config
    assert loaded.dtype_policy.name == "mixed_bfloat16"
    for mine, theirs in zip(loaded.variables, model.variables, strict=True):
        assert (mine.path, mine.dtype, mine.logical_axes) == (theirs.path, theirs.dtype, theirs.logical_axes)
    np.testing.assert_array_equal(loaded(features), model(features))
    assert loaded.optimizer.iterations == 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_it_evaluates_saves_and_loads(fresh_model, features, tmp_path, dtype):
    model = fresh_model(dtype, num_groups_multiple=2, semantics="mtf", scale_decoder_outputs=False, **SHALLOW)
    compile_model(model)
    targets, weights = features["decoder_target_tokens"], (features["decoder_target_tokens"] != 0).astype("float32")
    evaluated = model.evaluate(features, targets, sample_weight=weights, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, SwitchTransformer) and loaded.config == model.config
    assert loaded.dtype_policy.name == dtype
    for mine, theirs in zip(loaded.variables, model.variables, strict=True):
        assert (mine.path, mine.dtype, mine.logical_axes) == (theirs.path, theirs.dtype, theirs.logical_axes)
    np.testing.assert_array_equal(loaded(features), model(features))
    again = loaded.evaluate(features, targets, sample_weight=weights, verbose=0)
    np.testing.assert_allclose(again, evaluated, rtol=1e-5)


def test_fit_minimises_the_router_losses_too(fresh_model, features):
    model = fresh_model(load_balancing_loss_weight=100.0, router_z_loss_weight=0.0, eval_capacity_factor=4.0)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    loss = model.evaluate(features, features["decoder_target_tokens"], verbose=0)
    _, router_stats = model.forward(features)
    expected = sum(100 * float(stats.load_balancing_loss.value) for stats in router_stats)
    logits = np.asarray(model(features), np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected += -np.log(np.take_along_axis(probs, features["decoder_target_tokens"][..., None], -1)).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_its_config_is_json_and_makes_it_again(make_model):
    model = make_model("mixed_bfloat16", num_experts=3)
    config = json.loads(json.dumps(model.get_config()))
    again = SwitchTransformer.from_config(config)
    assert again.config == model.config and again.dtype_policy.name == "mixed_bfloat16"


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


def test_batch_and_lengths_may_be_unknown_while_tracing(make_model, features):
    model = make_model()
    names = ("encoder_input_tokens", "decoder_input_tokens")
    signature = {name: tf.TensorSpec([None, None], tf.int32) for name in names}
    traced = tf.function(lambda batch: model.forward(batch)[0], input_signature=[signature])
    batch = {name: tf.constant(features[name], tf.int32) for name in names}
    np.testing.assert_allclose(traced(batch), model.forward(batch)[0], rtol=1e-5, atol=1e-6)
