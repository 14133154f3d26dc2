"""The Switch layer by hand: groups, dropout, fillings, dispatches; routing_oracle_test.py has a loop over tokens."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import context
from switch_tf.layers import SwitchFeedForward, dispatch
from switch_tf.ops import forms, random
from tests.layers.switch_layers import D_FF, D_MODEL, built, make_attention, make_inputs, make_layer

# Hand-worked values.


def test_a_token_gets_its_gate_times_its_expert():
    layer = built(SwitchFeedForward(2, 1, min_expert_capacity=1, eval_capacity_factor=1.0), 2, np.log(3) * np.eye(2),
                  [[[2], [0]], [[0], [3]]], [[[10, 0]], [[0, 100]]])
    # 4 tokens, 2 experts, factor 1: 2 slots each. (1, 0) has probabilities (3/4, 1/4) and goes to expert 0:
    # 3/4 * relu(2) * 10 = 15. (0, 1) goes to expert 1: 3/4 * relu(3) * 100 = 225. The third (1, 0) finds no slot.
    x = np.array([[[1, 0], [1, 0]], [[0, 1], [1, 0]]], "float32")
    np.testing.assert_allclose(layer(x), [[[15, 0], [15, 0]], [[0, 225], [0, 0]]], rtol=1e-6)


def test_the_capacity_factor_follows_training():
    # 8 tokens for one of 2 experts: 8 * 0.5 / 2 = 2 slots in training, 8 * 1 / 2 = 4 elsewhere.
    layer = make_layer(2, train_capacity_factor=0.5, eval_capacity_factor=1.0)
    layer.router.kernel.assign(np.zeros((D_MODEL, 2)))
    x = np.ones((2, 4, D_MODEL), "float32")
    for training, num_dropped in ((True, 6), (False, 4)):
        _, stats = layer.forward(x, training=training)
        assert stats.fraction_tokens_dropped == (num_dropped, 8)


# Invariants.


def test_expert_dropout_is_elementwise_and_in_training_only():
    # One expert of the identity on positive inputs: what is zero was dropped.
    layer = built(SwitchFeedForward(1, d_ff=50, expert_dropout_rate=0.4, train_capacity_factor=1.0), 50,
                  1, *[np.eye(50)] * 2)
    x = np.ones((3, 8, 50), "float32")
    # The gate is the probability of an only expert, which some processors round to 1 - 2^-24.
    np.testing.assert_allclose(layer(x), x, rtol=1e-7)
    with random.random_seed(0):
        outputs = layer(x, training=True).numpy()
    dropped = outputs == 0
    np.testing.assert_allclose(outputs[~dropped], 1 / 0.6, rtol=1e-6)
    # 1200 elements: standard deviation 0.014, bound 4 of them. All 24 tokens have masks of their own.
    assert abs(dropped.mean() - 0.4) < 0.057
    assert len({mask.tobytes() for mask in dropped.reshape(-1, 50)}) == 24


def test_two_layers_draw_different_numbers():
    inputs = keras.Input((8, D_MODEL))
    layers = [SwitchFeedForward(1, d_ff=D_FF, expert_dropout_rate=0.5, name=name) for name in ("first", "second")]
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    layers[1].set_weights(layers[0].get_weights())
    x, _ = make_inputs(4, 8)
    with random.random_seed(0):
        first, second = model(x, training=True)
    assert np.mean(np.isclose(first, second)) < 0.5


# Equivalence.


@pytest.mark.parametrize("make, dispatch_name, tolerance", [
    (make_layer, "einsum", 1e-6), (make_layer, "index", 1e-6), (make_attention, "auto", 1e-5)])
def test_an_unknown_batch_gives_the_same_numbers(make, dispatch_name, tolerance):
    # Multiples of 8 tokens, and others, which are filled up with masked tokens.
    layer = make(num_groups_multiple=8, eval_capacity_factor=1.0, group_size=5, dispatch=dispatch_name)
    signature = [tf.TensorSpec([None, None, D_MODEL]), tf.TensorSpec([None, None], tf.bool)]
    # Once as users trace it, with autograph, which takes as long again.
    dynamic = tf.function(lambda x, mask: layer.forward(x, padding_mask=mask), input_signature=signature,
                          autograph=dispatch_name == "index")
    for batch, length in ((4, 6), (3, 5), (1, 1)):
        x, mask = make_inputs(batch, length, share_real=0.9)
        found, expected = (keras.tree.flatten(result) for result in (
            dynamic(x, mask), layer.forward(x, padding_mask=mask)))
        np.testing.assert_allclose(found[0], expected[0], rtol=tolerance, atol=1e-6)
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_filling_up_does_not_count():
    # 3 tokens filled up to 8: one for each group, of which 5 groups are empty.
    layer = make_layer(num_groups_multiple=8, eval_capacity_factor=3.0)
    x, _ = make_inputs(1, 3)
    outputs, stats = layer.forward(x)
    expected, expected_stats = make_layer(eval_capacity_factor=3.0).forward(x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    for name in ("expert_load", "router_entropy", "router_confidence", "router_z_loss"):
        mine, theirs = getattr(stats, name), getattr(expected_stats, name)
        np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-6, err_msg=name)
        assert mine.weight == theirs.weight == 3


# Semantics of Hugging Face.


def test_hf_makes_each_sequence_a_group_and_routes_padding():
    layer = built(SwitchFeedForward(2, 1, semantics="hf", expert_capacity=2, num_groups_multiple=64, jitter_noise=0.0),
                  1, [1, 0], 1, 1)
    mask = np.array([[True, False, True], [True, True, True]])
    for training in (False, True):
        outputs, stats = layer.forward(np.ones((2, 3, 1), "float32"), padding_mask=mask, training=training)
        # Two slots for each sequence; the padding takes the second one of the first.
        np.testing.assert_array_equal(outputs[..., 0] > 0, [[True, True, False]] * 2)
        assert stats.expert_load.weight == 6 and stats.fraction_tokens_dropped.total == 2


def test_hf_capacity_has_no_minimum_and_no_slots_beyond_the_sequence():
    layer = make_layer(semantics="hf", expert_capacity=64)
    _, stats = layer.forward(make_inputs(2, 5)[0])
    assert stats.fraction_tokens_dropped.total == 0
    # 10 tokens in 2 groups * 3 experts * 5 slots, as an expert takes each token once
    assert stats.expert_usage == (10, 2 * 3 * 5)


def test_a_training_batch_that_cannot_be_cut_is_refused_and_an_evaluation_batch_filled():
    layer = make_layer(num_groups_multiple=8)
    x = np.ones((3, 5, D_MODEL), "float32")
    with pytest.raises(ValueError, match=r"divides 15 tokens \(3 sequences of 5\) .* Use a batch of 8 sequences, or"):
        layer(x, training=True)
    assert layer(x).shape == x.shape
    assert layer(np.ones((8, 5, D_MODEL), "float32"), training=True).shape == (8, 5, D_MODEL)


def test_auto_takes_the_devices_dispatch(monkeypatch):
    made = []
    suited = [("index", "einsum"), ("einsum",)]
    monkeypatch.setattr(forms, "suited_dispatches", lambda: suited[len(made)])
    for way in (dispatch.Einsum, dispatch.Index):
        original = way.__init__
        monkeypatch.setattr(way, "__init__", lambda self, *args, original=original: (
            made.append(type(self).__name__), original(self, *args))[1])
    layer, (x, _) = make_layer(), make_inputs()
    first, second = layer(x), layer(x)
    assert made == ["Index", "Einsum"]
    np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_experts_that_none_of_a_few_tokens_wants_are_not_read(activation):
    """As in a step of decoding: 3 sequences of one token, one of them ended, and 16 experts, the idle ones NaN."""
    layers = {way: make_layer(16, dispatch=way, activation=activation) for way in ("index", "auto")}
    x = np.random.default_rng(5).normal(size=(3, 1, D_MODEL)).astype("float32")
    is_real = np.array([[True], [False], [True]])
    found = {}
    for way, layer in layers.items():
        x_in = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x_in)
            outputs = layer.forward(x_in, padding_mask=is_real)[0]
            loss = tf.reduce_sum(outputs**2)
        found[way] = outputs, tape.gradient(loss, [x_in, *layer.weights])
    np.testing.assert_allclose(found["auto"][0], found["index"][0], rtol=1e-5)
    for one, other in zip(found["auto"][1], found["index"][1], strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-4, atol=1e-6)
    layer = layers["auto"]
    is_idle = np.all(np.asarray(found["index"][1][-1]) == 0, axis=(1, 2))
    assert 14 <= is_idle.sum() < 16
    for kernel in layer.experts.weights:
        kernel.assign(np.where(is_idle[:, None, None], np.nan, kernel.numpy()))
    np.testing.assert_array_equal(layer.forward(x, padding_mask=is_real)[0], found["auto"][0])

    @tf.function(input_signature=[tf.TensorSpec([None, None, D_MODEL]), tf.TensorSpec([None, None], tf.bool)])
    def of_any_size(x, is_real):
        with context.within(no_drop=True):
            return layer.forward(x, padding_mask=is_real)[0]

    np.testing.assert_allclose(of_any_size(x, is_real), found["auto"][0], rtol=1e-5)
    assert not np.any(of_any_size(x, np.zeros((3, 1), bool)))
