"""Switch in attention against a loop over tokens, against plain attention, alone and inside of a Keras model."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import FeedForward, MultiHeadAttention, SwitchFeedForward, SwitchSelfAttention
from switch_tf.ops import random

D_MODEL, D_FF, NUM_HEADS, D_KV = 4, 5, 2, 3
CAUSAL = np.tril(np.ones((1, 1, 6, 6), bool))


def make_experts(name, num_experts, output_dim, **kwargs):
    return SwitchFeedForward(num_experts, **{"d_ff": D_FF, "min_expert_capacity": 1, **kwargs}, output_dim=output_dim,
                             name=name)


def unbuilt_layer(num_experts=3, num_heads=NUM_HEADS, d_kv=D_KV, dropout_rate=0.0, dtype="float32", **kwargs):
    """The keyword arguments go to both layers of experts."""
    experts = {name: make_experts(name, num_experts, num_heads * d_kv, **kwargs)
               for name in ("query_experts", "key_value_experts")}
    return SwitchSelfAttention(**experts, num_heads=num_heads, d_kv=d_kv, dropout_rate=dropout_rate, dtype=dtype)


def make_layer(num_experts=3, d_model=D_MODEL, seed=0, **kwargs):
    """A layer with random weights large enough that routes and outputs differ clearly."""
    layer = unbuilt_layer(num_experts, **kwargs)
    layer.build((None, None, d_model))
    rng = np.random.RandomState(seed)
    for weight in layer.weights:
        weight.assign(0.8 * rng.randn(*weight.shape))
    return layer


def make_inputs(batch=2, length=6, seed=1, share_real=0.7):
    rng = np.random.RandomState(seed)
    return rng.randn(batch, length, D_MODEL).astype("float32"), rng.rand(batch, length) < share_real


def make_identity_layer(query_wo, key_value_wo, out, **kwargs):
    """Returns a layer with one head and one expert each and hidden units equal to the inputs: d_model = d_ff = 2."""
    layer = unbuilt_layer(1, num_heads=1, d_kv=np.shape(out)[0], d_ff=2, **kwargs)
    layer.build((None, None, 2))
    for experts, wo in ((layer.query_experts, query_wo), (layer.key_value_experts, key_value_wo)):
        experts.experts.input_kernels[0].assign([np.eye(2)])
        experts.experts.wo.assign([wo])
    layer.out.assign([out])
    return layer


def naive_experts(x, is_real, capacity, router, wi, wo):
    """One token after the other in one group. Returns a list of vectors and the number of dropped real tokens."""
    outputs, taken, num_dropped = [], {}, 0
    for token, real in zip(tf.unstack(tf.reshape(x, (-1, x.shape[-1]))), np.reshape(is_real, -1), strict=True):
        probs = tf.nn.softmax(tf.linalg.matvec(router, token, transpose_a=True))
        expert = int(tf.argmax(probs))
        if real and taken.get(expert, 0) < capacity:
            taken[expert] = taken.get(expert, 0) + 1
            hidden = tf.nn.relu(tf.linalg.matvec(wi[expert], token, transpose_a=True))
            outputs.append(probs[expert] * tf.linalg.matvec(wo[expert], hidden, transpose_a=True))
        else:
            num_dropped += int(real)
            outputs.append(tf.zeros(wo.shape[-1], x.dtype))
    return outputs, num_dropped


def naive_switch_attention(x, is_real, mask, bias, capacity, weights):
    """One query, head and key at a time. Returns outputs and the numbers of dropped queries and keys."""
    batch, length, _ = x.shape
    out, *kernels = weights
    num_heads, d_kv, _ = out.shape
    queries, num_dropped_queries = naive_experts(x, is_real, capacity, *kernels[:3])
    key_values, num_dropped_keys = naive_experts(x, is_real, capacity, *kernels[3:])
    outputs = []
    for row in range(batch):
        for i in range(length):
            mixed = []
            for head in range(num_heads):
                part = slice(head * d_kv, (head + 1) * d_kv)
                query = queries[row * length + i][part] / math.sqrt(d_kv)
                allowed = [j for j in range(length) if mask[row, 0, i, j]]
                keys = [key_values[row * length + j][part] for j in allowed]
                scores = [tf.reduce_sum(query * key) + bias[0, head, i, j]
                          for j, key in zip(allowed, keys, strict=True)]
                probs = tf.nn.softmax(tf.stack(scores))
                mixed.append(tf.linalg.matvec(tf.stack(keys), probs, transpose_a=True))
            outputs.append(tf.einsum("hd,hdm->m", tf.stack(mixed), out))
    return tf.reshape(tf.stack(outputs), x.shape), [num_dropped_queries, num_dropped_keys]


def weights_of(layer):
    """The output projection, then router, wi and wo of the queries, and of the keys and values."""
    names = [weight.path.partition("/")[2] for weight in layer.weights]
    assert names == ["out", *(f"{which}_experts/{name}" for which in ("query", "key_value")
                              for name in ("router/kernel", "experts/wi", "experts/wo"))]
    return [weight.value for weight in layer.weights]


# Hand-worked values.


def test_one_vector_is_key_and_value_and_queries_are_scaled():
    # d_kv = 4. Token (1, 0): query (2, 0, 0, 0) / sqrt(4), key and value (ln 3, 0, 0, 0). Token (0, 1): zeros.
    layer = make_identity_layer([[2, 0, 0, 0], [0] * 4], [[math.log(3), 0, 0, 0], [0] * 4],
                                [[1 / math.log(3), 0], [0, 0], [0, 0], [0, 0]], eval_capacity_factor=1.0)
    outputs = layer(np.array([[[1, 0], [0, 1]]], "float32"))
    # Scores of token 1 are ln 3 and 0, so 3/4 of the value ln 3, over ln 3; token 2 has scores 0 and 0.
    np.testing.assert_allclose(outputs, [[[0.75, 0], [0.5, 0]]], rtol=1e-6)


def test_a_dropped_token_has_a_zero_query_key_and_value():
    # One slot for two tokens: of (1, 0) and (1, 0) the second is dropped. Query ln 3, key and value 1 for the first.
    layer = make_identity_layer([[math.log(3)], [0]], [[1], [0]], [[1, 0]], eval_capacity_factor=0.5)
    x = np.array([[[1, 0], [1, 0]]], "float32")
    outputs, stats = layer.forward(x)
    assert [float(each.fraction_tokens_dropped.value) for each in stats] == [0.5, 0.5]
    # Token 1 sees scores ln 3 and 0 with values 1 and 0: 3/4. Token 2 sees 0 and 0: 1/2.
    np.testing.assert_allclose(outputs[..., 0], [[0.75, 0.5]], rtol=1e-6)
    bias = np.array([[[[0, 0], [math.log(3), 0]]]], "float32")
    # The position bias is all that a zero query goes by: ln 3 and 0.
    np.testing.assert_allclose(layer(x, position_bias=bias)[..., 0], [[0.75, 0.75]], rtol=1e-6)


def test_the_two_routers_decide_apart():
    layer = make_layer(2, eval_capacity_factor=2.0)
    layer.query_experts.router.kernel.assign(np.tile([5.0, 0.0], (D_MODEL, 1)))
    layer.key_value_experts.router.kernel.assign(np.tile([0.0, 5.0], (D_MODEL, 1)))
    _, (query_stats, key_value_stats) = layer.forward(np.ones((1, 6, D_MODEL), "float32"))
    np.testing.assert_array_equal(query_stats.expert_load.total, [6, 0])
    np.testing.assert_array_equal(key_value_stats.expert_load.total, [0, 6])


# Invariants.


@pytest.mark.parametrize("mask, is_reached", [
    (None, [True] * 6), (CAUSAL, [False, False, True, True, True, True]),
    (np.arange(6)[None, None, None] != 2, [False, False, True, False, False, False]),
], ids=["everything", "causal", "token 2 hidden"])
def test_a_token_attends_to_others_as_the_mask_allows(mask, is_reached):
    # Enough slots: token 2 reaches others through attention alone.
    layer, (x, _) = make_layer(eval_capacity_factor=3.0), make_inputs(1)
    changed = x.copy()
    changed[:, 2] *= -1
    outputs, again = (layer(inputs, attention_mask=mask).numpy() for inputs in (x, changed))
    difference = np.abs(again - outputs).max(-1)[0]
    assert (difference > 1e-3).tolist() == is_reached
    assert (difference[np.logical_not(is_reached)] == 0).all()


def test_later_tokens_do_not_change_earlier_ones_under_a_causal_mask():
    layer, (x, _) = make_layer(eval_capacity_factor=0.7), make_inputs(1)
    outputs, stats = layer.forward(x, attention_mask=CAUSAL)
    assert all(each.fraction_tokens_dropped.total > 0 for each in stats)
    for position in range(1, 6):
        changed = x.copy()
        changed[:, position:] *= -1
        np.testing.assert_array_equal(layer(changed, attention_mask=CAUSAL)[:, :position], outputs[:, :position])


def test_what_padding_holds_does_not_matter():
    layer, (x, is_real) = make_layer(eval_capacity_factor=0.7), make_inputs()
    masks = {"padding_mask": is_real, "attention_mask": is_real[:, None, None]}
    outputs, stats = layer.forward(x, **masks)
    assert [float(each.expert_load.weight) for each in stats] == [is_real.sum()] * 2
    changed = np.where(is_real[..., None], x, 1e3).astype("float32")
    np.testing.assert_array_equal(layer(changed, **masks)[is_real], outputs[is_real])


def test_dropout_is_on_probabilities_and_in_training_only():
    # Zero queries: each of 40 keys has probability 1/40. Value i is 2^-i, so the output encodes the dropped keys.
    layer = make_identity_layer([[0], [0]], [[1], [0]], [[40.0, 0]], dropout_rate=0.5, train_capacity_factor=1.0)
    x = np.stack([2.0 ** -np.arange(40), np.zeros(40)], -1)[None].astype("float32")
    with random.random_seed(0):
        outputs = layer(x, training=True).numpy()[0, :, 0]
    assert (outputs == outputs[0]).all() and abs(outputs[0] - 2) > 1e-3
    np.testing.assert_allclose(layer(x)[0, :, 0], np.full(40, 2.0), rtol=1e-5)


# Equivalence.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("factor, capacity", [(0.5, 2), (3.0, 12)])  # 12 tokens and 3 experts: 12 * 0.5 / 3 = 2
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(factor, capacity, is_causal):
    layer = make_layer(train_capacity_factor=factor, jitter_noise=0.0)
    x, is_real = make_inputs()
    is_real[:, 0] = True
    mask = np.logical_and(is_real[:, None, None], CAUSAL if is_causal else True)
    mask = np.broadcast_to(mask, (2, 1, 6, 6))
    rng = np.random.RandomState(2)
    bias, target = rng.randn(1, NUM_HEADS, 6, 6), rng.randn(*x.shape)

    def run(function, weights, dtype):
        inputs = tf.constant(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch([inputs, *weights])
            outputs, aside = function(inputs)
            loss = tf.reduce_sum((outputs - tf.constant(target, dtype)) ** 2)
        return outputs.numpy(), aside, [gradient.numpy() for gradient in tape.gradient(loss, [inputs, *weights])]

    outputs, stats, gradients = run(
        lambda inputs: layer.forward(inputs, padding_mask=is_real, attention_mask=mask,
                                     position_bias=bias.astype("float32"), training=True),
        weights_of(layer), tf.float32)
    weights = [tf.cast(weight, tf.float64) for weight in weights_of(layer)]
    expected, num_dropped, expected_gradients = run(
        lambda inputs: naive_switch_attention(inputs, is_real, mask, bias, capacity, weights), weights, tf.float64)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    assert [int(each.fraction_tokens_dropped.total) for each in stats] == num_dropped
    assert [number > 0 for number in num_dropped] == [factor < 3] * 2
    names = ["inputs", *(weight.path for weight in layer.weights)]
    for name, mine, theirs in zip(names, gradients, expected_gradients, strict=True):
        # Both routers and both sets of experts learn.
        assert np.abs(theirs).max() > 0.01, name
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_one_expert_is_plain_attention_with_feed_forward_projections(activation):
    # d_model is heads times d_kv, so that dense layers can project and the kernels of plain attention be identities.
    width = NUM_HEADS * D_KV
    layer = make_layer(1, d_model=width, activation=activation, train_capacity_factor=1.0)
    dense = [FeedForward(D_FF, activation) for _ in range(2)]
    for mine, experts in zip(dense, (layer.query_experts, layer.key_value_experts), strict=True):
        mine.build((None, None, width))
        for weight, stacked in zip(mine.weights, experts.experts.weights, strict=True):
            weight.assign(stacked[0])
    attention = MultiHeadAttention(NUM_HEADS, D_KV)
    attention.build((None, None, width))
    identity = np.eye(width).reshape(width, NUM_HEADS, D_KV)
    for weight, value in zip(attention.weights, (identity / math.sqrt(D_KV), identity, identity, layer.out.numpy()),
                             strict=True):
        weight.assign(value)
    rng = np.random.RandomState(3)
    x, upstream = tf.constant(rng.randn(2, 2, 6, width), tf.float32)
    options = {"attention_mask": CAUSAL, "position_bias": rng.randn(1, NUM_HEADS, 6, 6).astype("float32"),
               "training": True}

    def plain(x):
        return attention(dense[0](x), inputs_kv=dense[1](x), **options)

    kernels = [[*layer.query_experts.experts.weights, *layer.key_value_experts.experts.weights, layer.out],
               [*dense[0].weights, *dense[1].weights, attention.out]]
    results = []
    for function, weights in zip((lambda x: layer(x, **options), plain), kernels, strict=True):
        values = [weight.value for weight in weights]
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = function(x)
            loss = tf.reduce_sum(outputs * upstream)
        results.append([outputs, *(tf.squeeze(gradient) for gradient in tape.gradient(loss, [x, *values]))])
    for mine, theirs in zip(*results, strict=True):
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_an_unknown_batch_gives_the_same_numbers():
    layer = make_layer(eval_capacity_factor=1.0, num_groups_multiple=4)
    signature = [tf.TensorSpec([None, None, D_MODEL]), tf.TensorSpec([None, None], tf.bool)]
    dynamic = tf.function(
        lambda x, is_real: layer.forward(x, padding_mask=is_real, attention_mask=is_real[:, None, None]),
        input_signature=signature)
    for batch, length in ((2, 6), (3, 5)):
        x, is_real = make_inputs(batch, length, share_real=0.9)
        expected, _ = layer.forward(x, padding_mask=is_real, attention_mask=is_real[:, None, None])
        np.testing.assert_allclose(dynamic(x, is_real)[0], expected, rtol=1e-5, atol=1e-6)


def test_hash_routing_goes_by_token_ids():
    layer = unbuilt_layer(2, router="hash", eval_capacity_factor=2.0)
    layer.build((None, None, D_MODEL))
    x, _ = make_inputs(1)
    _, stats = layer.forward(x, token_ids=np.array([[2, 4, 6, 8, 10, 1]]))
    assert [each.expert_load.total.numpy().tolist() for each in stats] == [[5, 1]] * 2
    assert not [weight for weight in layer.weights if "router" in weight.path]


# Keras: losses, functional models, serialisation, dtype policy.


def test_calling_adds_the_weighted_losses_of_both_routers_and_forward_adds_none():
    layer = make_layer(load_balancing_loss_weight=0.25, router_z_loss_weight=0.125)
    x, is_real = make_inputs()
    outputs, stats = layer.forward(x, padding_mask=is_real)
    assert layer.losses == []
    np.testing.assert_array_equal(layer(x, padding_mask=is_real), outputs)
    expected = [0.25 * each.load_balancing_loss.value + 0.125 * each.router_z_loss.value for each in stats]
    np.testing.assert_allclose(layer.losses, expected, rtol=1e-6)
    assert expected[0] != expected[1]


@pytest.mark.slow
def test_in_a_functional_model_it_trains_saves_and_loads(tmp_path):
    keras.utils.set_random_seed(0)
    inputs, is_real = keras.Input((6, D_MODEL)), keras.Input((6,), dtype="bool")
    layer = unbuilt_layer()
    hidden = inputs + layer(inputs, padding_mask=is_real)
    model = keras.Model([inputs, is_real], keras.layers.Dense(1)(hidden))
    x, mask = make_inputs(12, 6)
    model.compile(keras.optimizers.Adam(1e-2), loss="mse", jit_compile=False)  # moe_keras_test.py compiles with XLA
    before = [weight.numpy() for weight in layer.weights]
    losses = model.fit([x, mask], x.sum(-1, keepdims=True), batch_size=5, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for weight, start in zip(layer.weights, before, strict=True):
        assert np.abs(weight.numpy() - start).max() > 1e-3, weight.path
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict([x, mask], verbose=0), model.predict([x, mask], verbose=0), rtol=1e-6)
    assert [weight.path for weight in again.weights] == [weight.path for weight in model.weights]


def test_its_config_makes_it_again():
    experts = [make_experts(name, 3, 6, dtype="float32", **options) for name, options in (
        ("query_experts", {"group_size": 8}), ("key_value_experts", {"activation": "geglu"}))]
    arguments = {"num_heads": 2, "d_kv": 3, "dropout_rate": 0.2, "init_scale": 0.5, "name": "mine"}
    layer = SwitchSelfAttention(*experts, **arguments, dtype="mixed_bfloat16")
    config = layer.get_config()
    again = SwitchSelfAttention.from_config(config)
    assert again.get_config() == config
    layer.build((None, None, D_MODEL))
    assert layer.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert (again.query_experts.group_size, again.key_value_experts.activation) == (8, "geglu")
    assert [part.name for part in (again.query_experts, again.key_value_experts)] == ["query_experts",
                                                                                     "key_value_experts"]
    assert {part.dtype_policy.name for part in (again.query_experts, again.key_value_experts)} == {"float32"}


@pytest.mark.parametrize("expert_dtype, expected", [("float32", 1 / (1 + math.exp(-1))), ("mixed_bfloat16", 0.5)])
def test_under_bfloat16_scores_see_what_float32_experts_computed(expert_dtype, expected):
    # d_kv = 2. The query of (1, 0) is (sqrt 2, 0) / sqrt 2; keys are (257, 1) and (256, 0); 257 and 256 are
    # equal in bfloat16. The output is the probability of the first.
    experts = [make_experts(name, 1, 2, d_ff=2, eval_capacity_factor=1.0, dtype=expert_dtype)
               for name in ("query_experts", "key_value_experts")]
    layer = SwitchSelfAttention(*experts, num_heads=1, d_kv=2, dtype="mixed_bfloat16")
    layer.build((None, None, 2))
    for each, wo in zip(experts, ([[math.sqrt(2), 0], [0, 0]], [[257, 1], [256, 0]]), strict=True):
        each.experts.input_kernels[0].assign([np.eye(2)])
        each.experts.wo.assign([wo])
    layer.out.assign([[[0, 0], [1, 0]]])
    outputs, stats = layer.forward(tf.constant([[[1.0, 0], [0, 1]]], tf.bfloat16))
    assert outputs.dtype == tf.bfloat16
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    assert all(mean.total.dtype == tf.float32 for each in stats for mean in each)
    np.testing.assert_allclose(float(outputs[0, 0, 0]), expected, rtol=2**-8)


def test_initial_values():
    layer = SwitchSelfAttention(*(SwitchFeedForward(2, 100, init_scale=0.1, output_dim=100, name=name)
                                  for name in ("query", "key_value")), num_heads=4, d_kv=25, init_scale=4.0)
    layer.build((None, None, 50))
    np.testing.assert_allclose(layer.out.numpy().std(), 2 / math.sqrt(4 * 25), rtol=0.05)
    assert layer.out.logical_axes == ("heads", "kv", "embed")
    for experts in (layer.query_experts, layer.key_value_experts):
        # After truncation 0.8796 of sqrt(0.1 / d_ff); no other scale for queries.
        np.testing.assert_allclose(experts.experts.wo.numpy().std(), 0.8796 * math.sqrt(0.1 / 100), rtol=0.05)


# Refusals.


@pytest.mark.parametrize("query_name, output_dim, message", [
    ("query", None, r"query_experts must have output_dim=6 \(num_heads \* d_kv\), not None"),
    ("query", 4, r"query_experts must have output_dim=6 \(num_heads \* d_kv\), not 4"),
    ("key_value", 6, "query_experts and key_value_experts are both named 'key_value'; make two layers"),
])
def test_experts_that_do_not_fit_are_refused(query_name, output_dim, message):
    with pytest.raises(ValueError, match=message):
        SwitchSelfAttention(make_experts(query_name, 2, output_dim), make_experts("key_value", 2, 6), NUM_HEADS, D_KV)
