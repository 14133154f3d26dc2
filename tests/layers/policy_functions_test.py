"""The functions that decide by themselves: of scores, by hand. tests/golden/routing.json has a whole case for each."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from switch_tf.configs.policies import Top2
from switch_tf.layers import Router, SwitchFeedForward, policy_functions
from switch_tf.layers.decisions import Options, Scores
from switch_tf.ops import random
from tests.layers.switch_layers import built


def scores(*odds, is_real=None):
    """Scores of one group of tokens: logits are the logarithms of the odds, probabilities their shares."""
    odds = np.array([odds], "float32")
    return Scores(tf.math.log(odds), tf.constant(odds / odds.sum(-1, keepdims=True)),
                  tf.constant(np.array([is_real or [True] * odds.shape[1]], bool)))


def decide(name, scores, capacity, rounds=None, **options):
    """What `policy_functions.<name>` makes of scores."""
    options = Options(scores.selection.shape[-1], capacity, policy=Top2(second_expert="all"), **options)
    return getattr(policy_functions, name)(scores, options, **({"rounds": rounds} if rounds else {}))


def of_one_group(array):
    return np.asarray(array)[0].tolist()


# No-Token-Left-Behind.


def test_a_token_left_over_tries_four_experts_and_no_more():
    # 5 experts with one slot; all 6 tokens rank them 0, 1, 2, 3, 4. Each round serves one; the rest gives up after 4.
    decisions = decide("ntlb", scores(*[[5, 4, 3, 2, 1]] * 6), 1)
    assert of_one_group(decisions.expert_index[..., 0])[:4] == [0, 1, 2, 3]
    assert of_one_group(decisions.slot[..., 0]) == [0, 0, 0, 0, 1, 1]
    np.testing.assert_allclose(decisions.gate[0, :, 0], [5 / 15, 4 / 15, 3 / 15, 2 / 15, 0, 0], rtol=1e-6)


def test_who_came_in_any_earlier_round_is_ahead_in_an_experts_queue():
    # Two slots. Experts 0 and 1 are full after the first round, in which expert 2 takes the fifth token. In the second
    # it takes the sixth (0, then 2), and in the third the last one (0, then 1, then 2) finds it full.
    decisions = decide("ntlb", scores(*[[5, 3, 1]] * 2, *[[3, 5, 1]] * 2, [1, 2, 5], [5, 1, 3], [5, 3, 1]), 2)
    assert of_one_group(decisions.expert_index[..., 0]) == [0, 0, 1, 1, 2, 2, 2]
    assert of_one_group(decisions.slot[..., 0]) == [0, 1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("rounds, slots", [(1, [0, 1, 1]), (2, [0, 0, 1]), (3, [0, 0, 0]), (9, [0, 0, 0])])
def test_the_number_of_rounds_ends_with_the_experts(rounds, slots):
    decisions = decide("ntlb", scores([3, 2, 1], [3, 2, 1], [3, 2, 1]), 1, rounds=rounds)
    assert of_one_group(decisions.slot[..., 0]) == slots


# Batch-prioritized.


def test_padding_stands_behind_however_confident_it_is():
    decisions = decide("batch_prioritized", scores([2, 1], [99, 1], [3, 1], is_real=[1, 0, 1]), 2)
    assert of_one_group(decisions.slot[..., 0]) == [1, 2, 0]


def test_confidence_that_is_not_a_number_stands_behind_all_that_is():
    one = scores([2, 1], [1, 1], [3, 1])
    probs = tf.tensor_scatter_nd_update(one.probs, [[0, 1]], [[np.nan, np.nan]])
    decisions = decide("batch_prioritized", one._replace(probs=probs), 2)
    assert of_one_group(decisions.slot[..., 0]) == [1, 2, 0]


# Top-n.


@pytest.mark.parametrize("rule, kept", [
    ("all", [True, True, True, True]), ("none", [False] * 4), ("threshold", [False, False, True, True]),
    # The gate over the threshold: 0.1 / 0.25 = 0.4, 0.25 / 0.25 = 1, 1.2, 1.6, against 0.45, 0.99, 0.99, 0.0
    ("random", [False, True, True, True])])
def test_which_second_choices_are_carried_out(rule, kept):
    uniforms = tf.constant([[[0.45], [0.99], [0.99], [0.0]]])
    gates = tf.constant([[[0.9, 0.1], [0.75, 0.25], [0.7, 0.3], [0.6, 0.4]]])
    shapes = []
    options = Options(2, 4, policy=Top2(second_expert=rule, threshold=0.25),
                      uniform=lambda shape: shapes.append(tuple(shape)) or uniforms)
    wanted = policy_functions.second_choices(gates, options)
    assert wanted.dtype == tf.bool
    assert of_one_group(wanted) == [[True, second] for second in kept]
    assert shapes == ([(1, 4, 1)] if rule == "random" else [])
    # At inference there are no numbers, and "random" is "all".
    wanted = policy_functions.second_choices(gates, options._replace(uniform=None))
    assert of_one_group(wanted) == [[True, rule == "random" or second] for second in kept]


def test_gates_are_normalised_before_anything_is_dropped():
    # 5/9 and 4/9 of both tokens; the second one finds no slot for its first choice and keeps 4/9 for its second.
    decisions = decide("top_n", scores([5, 4, 1], [5, 1, 4]), 1, num_choices=2)
    np.testing.assert_allclose(decisions.gate, [[[5 / 9, 4 / 9], [0, 4 / 9]]], rtol=1e-6)
    decisions = decide("top_n", scores([5, 4, 1], [5, 1, 4]), 1, num_choices=2, is_normalized=False)
    np.testing.assert_allclose(decisions.gate, [[[0.5, 0.4], [0, 0.4]]], rtol=1e-6)


def test_the_gradient_of_a_normalised_gate_is_that_of_the_share():
    logits = tf.math.log([[[5.0, 4.0, 1.0]]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        decisions = decide("top_n", Scores(logits, ops.softmax(logits), tf.ones((1, 1), tf.bool)), 1, num_choices=2)
        gate = decisions.gate[0, 0, 0]
    # g = a / (a + b): d g / d logits = (g (1 - g), -g (1 - g), 0) with g = 5/9
    np.testing.assert_allclose(tape.gradient(gate, logits), [[[20 / 81, -20 / 81, 0]]], atol=1e-6)


def test_one_choice_of_top_n_is_switch():
    odds = ([3, 2, 1], [1, 2, 3], [9, 1, 1], [5, 1, 1])
    for mine, theirs in zip(decide("top_n", scores(*odds), 2), decide("switch", scores(*odds), 2), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# Sinkhorn.


def test_balanced_preferences_give_every_expert_the_same_sum():
    random = np.random.RandomState(0)
    logits, is_real = random.randn(3, 10, 4).astype("float32"), random.rand(3, 10) < 0.7
    plan = np.asarray(ops.softmax(policy_functions.balanced(tf.constant(logits), tf.constant(is_real)), axis=-1))
    sums = (plan * is_real[..., None]).sum(1)
    np.testing.assert_allclose(sums, np.repeat(is_real.sum(1)[:, None] / 4, 4, axis=1), rtol=0.01)


def test_prices_are_the_same_for_all_tokens_and_have_no_gradient():
    logits = tf.constant(np.random.RandomState(0).randn(1, 6, 3).astype("float32"))
    with tf.GradientTape() as tape:
        tape.watch(logits)
        balanced = policy_functions.balanced(logits, tf.ones((1, 6), tf.bool))
    price = np.asarray(balanced - logits)[0]
    np.testing.assert_allclose(price, np.repeat(price[:1], 6, axis=0), atol=1e-5)
    assert tape.gradient(balanced, logits) is None


def test_a_group_of_padding_has_finite_preferences():
    nothing = policy_functions.balanced(tf.constant(np.random.RandomState(0).randn(1, 4, 3).astype("float32")),
                                tf.zeros((1, 4), tf.bool))
    assert np.isfinite(nothing).all()


# Hash.


def test_token_ids_wrap_around_the_experts_and_gates_are_1():
    decisions = policy_functions.hashed(
        Scores(None, None, tf.ones((1, 5), tf.bool), tf.constant([[0, 1, 2, 3, 31999]])),
        Options(num_experts=3, capacity=5))
    # 31999 = 3 * 10666 + 1
    assert [of_one_group(array[..., 0]) for array in decisions[:3]] == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 1], [1] * 5]


# Expert choice.


@pytest.mark.parametrize("semantics", ["switch_tf", "mtf", "t5x"])
def test_experts_may_have_more_slots_than_an_unknown_batch_has_tokens(semantics):
    # At least 4 slots by the rule of Mesh TensorFlow and T5X, for 2 tokens.
    layer = built(SwitchFeedForward(3, 4, semantics=semantics, min_expert_capacity=4,
                                    router=Router(3, policy="expert_choice", semantics=semantics)), 4)
    compiled = tf.function(lambda x: layer.forward(x)[0], input_signature=[tf.TensorSpec([None, None, 4])])
    x = np.random.RandomState(0).randn(1, 2, 4).astype("float32")
    np.testing.assert_allclose(compiled(x), layer.forward(x)[0], rtol=1e-6)


# Serialisation.


@pytest.mark.parametrize("arguments", [
    {"policy": "top2", "second_expert_policy": "threshold", "second_expert_threshold": 0.3,
     "second_place_loss_weight": 0.5},
    {"policy": "top_n", "num_selected_experts": 3, "exploration": "sample"},
    {"policy": "hash"}, {"policy": "expert_choice", "semantics": "t5x"}])
def test_a_layers_config_makes_its_router_again(arguments):
    layer = SwitchFeedForward(4, 5, semantics=arguments.get("semantics", "switch_tf"), router=Router(4, **arguments),
                              name="layer")
    again = SwitchFeedForward.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert {name: getattr(again.router, name) for name in arguments} == arguments
    for one in (layer, again):
        built(one, 3)
    x, token_ids = np.random.RandomState(0).randn(2, 6, 3).astype("float32"), np.arange(12).reshape(2, 6)
    with random.random_seed(0):
        np.testing.assert_array_equal(layer(x, token_ids=token_ids), again(x, token_ids=token_ids))
