"""Switch in attention by hand, and against plain attention over what its experts say."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.layers import SwitchFeedForward, SwitchSelfAttention
from switch_tf.ops import random
from tests.layers.switch_layers import D_MODEL, built, make_attention, make_inputs, switch_attention

CAUSAL = np.tril(np.ones((1, 1, 6, 6), bool))


def make_identity_layer(query_wo, key_value_wo, out, **kwargs):
    """Returns a layer with one head and one expert each and hidden units equal to the inputs: d_model = d_ff = 2."""
    layer = switch_attention(1, num_heads=1, d_kv=len(query_wo[0]), d_ff=2, **kwargs)
    return built(layer, 2, out, 1, np.eye(2), query_wo, 1, np.eye(2), key_value_wo)


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
    layer = make_attention(2, eval_capacity_factor=2.0)
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
    layer, (x, _) = make_attention(eval_capacity_factor=3.0), make_inputs(1)
    changed = x.copy()
    changed[:, 2] *= -1
    outputs, again = (layer(inputs, attention_mask=mask).numpy() for inputs in (x, changed))
    difference = np.abs(again - outputs).max(-1)[0]
    assert (difference > 1e-3).tolist() == is_reached
    assert (difference[np.logical_not(is_reached)] == 0).all()


def test_what_padding_holds_does_not_matter():
    layer, (x, is_real) = make_attention(eval_capacity_factor=0.7), make_inputs()
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
@pytest.mark.parametrize("factor", [0.5, 3.0])  # 12 tokens and 3 experts: 12 * 0.5 / 3 = 2 slots, or enough
def test_outputs_and_gradients_are_those_of_plain_attention_over_the_experts_outputs(factor, is_causal):
    layer = make_attention(train_capacity_factor=factor, jitter_noise=0.0)
    x, is_real = make_inputs()
    is_real[:, 0] = True
    mask = is_real[:, None, None] & (CAUSAL if is_causal else True) & np.ones((6, 1), bool)
    rng = np.random.RandomState(2)
    bias, target, x = (tf.constant(array, tf.float32) for array in (rng.randn(1, 2, 6, 6), rng.randn(*x.shape), x))
    sources = [x, *(weight.value for weight in layer.weights)]

    def plain(x):
        both = [experts.forward(x, padding_mask=is_real, training=True)
                for experts in (layer.query_experts, layer.key_value_experts)]
        query, key_value = (tf.reshape(outputs, (2, 6, 2, 3)) for outputs, _ in both)
        scores = tf.einsum("bqhd,bkhd->bhqk", query, key_value) / math.sqrt(3) + bias
        mixed = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(tf.where(mask, scores, -1e9)), key_value)
        return tf.einsum("bqhd,hdm->bqm", mixed, layer.out.value), [stats for _, stats in both]

    def run(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, stats = function(x)
            loss = tf.reduce_sum((outputs - target) ** 2)
        return outputs, [each.fraction_tokens_dropped.total for each in stats], tape.gradient(loss, sources)

    outputs, num_dropped, gradients = run(lambda x: layer.forward(
        x, padding_mask=is_real, attention_mask=mask, position_bias=bias, training=True))
    expected, their_dropped, their_gradients = run(plain)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    assert num_dropped == their_dropped and [number > 0 for number in num_dropped] == [factor < 3] * 2
    for weight, mine, theirs in zip(["inputs", *layer.weights], gradients, their_gradients, strict=True):
        # Both routers and both sets of experts learn.
        assert np.abs(theirs).max() > 0.01, weight
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max(), err_msg=str(weight))


def test_hash_routing_goes_by_token_ids():
    layer = make_attention(2, router="hash", eval_capacity_factor=2.0)
    x, _ = make_inputs(1)
    _, stats = layer.forward(x, token_ids=np.array([[2, 4, 6, 8, 10, 1]]))
    assert [each.expert_load.total.numpy().tolist() for each in stats] == [[5, 1]] * 2
    assert not [weight for weight in layer.weights if "router" in weight.path]


# Dtype policy and initial values.


def test_its_config_makes_it_again_built_or_not():
    experts = [SwitchFeedForward(3, 5, output_dim=6, dtype="float32", name=name, **options) for name, options in (
        ("query_experts", {"group_size": 8}), ("key_value_experts", {"activation": "geglu"}))]
    arguments = {"num_heads": 2, "d_kv": 3, "dropout_rate": 0.2, "init_scale": 0.5, "name": "mine"}
    layer = SwitchSelfAttention(*experts, **arguments, dtype="mixed_bfloat16")
    config = layer.get_config()
    layer.build((None, None, D_MODEL))
    again = SwitchSelfAttention.from_config(config)
    assert again.get_config() == layer.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert (again.query_experts.group_size, again.key_value_experts.activation) == (8, "geglu")
    assert [(part.name, part.dtype_policy.name) for part in again.expert_layers] == [
        ("query_experts", "float32"), ("key_value_experts", "float32")]


@pytest.mark.parametrize("expert_dtype, expected", [("float32", 1 / (1 + math.exp(-1))), ("mixed_bfloat16", 0.5)])
def test_under_bfloat16_scores_see_what_float32_experts_computed(expert_dtype, expected):
    # d_kv = 2. The query of (1, 0) is (sqrt 2, 0) / sqrt 2; keys are (257, 1) and (256, 0); 257 and 256 are
    # equal in bfloat16. The output is the probability of the first.
    experts = [SwitchFeedForward(1, 2, output_dim=2, eval_capacity_factor=1.0, dtype=expert_dtype, name=name)
               for name in "qk"]
    layer = built(SwitchSelfAttention(*experts, num_heads=1, d_kv=2, dtype="mixed_bfloat16"), 2, [[0, 0], [1, 0]],
                  1, np.eye(2), [[math.sqrt(2), 0], [0, 0]], 1, np.eye(2), [[257, 1], [256, 0]])
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
