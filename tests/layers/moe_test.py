"""The Switch layer against a loop over tokens, and against the dense layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import context, partitioning
from switch_tf.layers import FeedForward, SwitchFeedForward, dispatch
from switch_tf.ops import forms, random
from tests.layers.switch_layers import D_FF, D_MODEL, make_inputs, make_layer


def naive_switch(x, mask, num_groups, capacity, router, wi, wo):
    """One token after the other, in float64. Returns outputs and the number of dropped real tokens."""
    tokens, is_real = tf.reshape(x, (-1, x.shape[-1])), np.reshape(mask, -1)
    outputs, taken, num_dropped = [], {}, 0
    for i, token in enumerate(tf.unstack(tokens)):
        group = i // (len(is_real) // num_groups)
        probs = tf.nn.softmax(tf.linalg.matvec(router, token, transpose_a=True))
        expert = int(tf.argmax(probs))
        slot = taken.get((group, expert), 0)
        if is_real[i] and slot < capacity:
            taken[group, expert] = slot + 1
            hidden = tf.nn.relu(tf.linalg.matvec(wi[expert], token, transpose_a=True))
            outputs.append(probs[expert] * tf.linalg.matvec(wo[expert], hidden, transpose_a=True))
        else:
            num_dropped += int(is_real[i])
            outputs.append(tf.zeros_like(token))
    return tf.reshape(tf.stack(outputs), x.shape), num_dropped


def weights_of(layer):
    return [layer.router.kernel.value, layer.experts.input_kernels[0].value, layer.experts.wo.value]


# Hand-worked values.


def test_a_token_gets_its_gate_times_its_expert():
    layer = SwitchFeedForward(num_experts=2, d_ff=1, min_expert_capacity=1, eval_capacity_factor=1.0)
    layer.build((None, None, 2))
    layer.router.kernel.assign(np.log(3) * np.eye(2))
    layer.experts.input_kernels[0].assign([[[2.0], [0.0]], [[0.0], [3.0]]])
    layer.experts.wo.assign([[[10.0, 0.0]], [[0.0, 100.0]]])
    # 4 tokens, 2 experts, factor 1: 2 slots each. (1, 0) has probabilities (3/4, 1/4) and goes to expert 0:
    # 3/4 * relu(2) * 10 = 15. (0, 1) goes to expert 1: 3/4 * relu(3) * 100 = 225. The third (1, 0) finds no slot.
    x = np.array([[[1, 0], [1, 0]], [[0, 1], [1, 0]]], "float32")
    np.testing.assert_allclose(layer(x), [[[15, 0], [15, 0]], [[0, 225], [0, 0]]], rtol=1e-6)


def test_groups_are_cut_across_sequences_in_order():
    # 3 sequences of 2 tokens, all for expert 0, in 2 groups of 3 with one slot: tokens 0 and 3 are kept.
    layer = SwitchFeedForward(num_experts=2, d_ff=1, group_size=3, min_expert_capacity=1, eval_capacity_factor=0.67)
    layer.build((None, None, 1))
    layer.router.kernel.assign([[1.0, 0.0]])
    layer.experts.input_kernels[0].assign(np.ones((2, 1, 1)))
    layer.experts.wo.assign(np.ones((2, 1, 1)))
    outputs = layer(np.ones((3, 2, 1), "float32")).numpy()[..., 0]
    np.testing.assert_array_equal(outputs > 0, [[True, False], [False, True], [False, False]])


def test_the_capacity_factor_follows_training():
    # 8 tokens for one of 2 experts: 8 * 0.5 / 2 = 2 slots in training, 8 * 1 / 2 = 4 elsewhere.
    layer = make_layer(2, train_capacity_factor=0.5, eval_capacity_factor=1.0)
    layer.router.kernel.assign(np.zeros((D_MODEL, 2)))
    x = np.ones((2, 4, D_MODEL), "float32")
    for training, num_dropped in ((True, 6), (False, 4)):
        _, stats = layer.forward(x, training=training)
        assert stats.fraction_tokens_dropped == (num_dropped, 8)


# Invariants.


@pytest.mark.parametrize("dispatch_name", ["einsum", "index"])
def test_dropped_tokens_and_padding_get_exactly_zero(dispatch_name):
    layer, (x, mask) = make_layer(eval_capacity_factor=0.5, dispatch=dispatch_name), make_inputs(4, 9)
    outputs, stats = layer.forward(x, padding_mask=mask)
    is_zero = ~outputs.numpy().any(-1)
    assert is_zero[~mask].all()
    assert is_zero[mask].sum() == stats.fraction_tokens_dropped.total > 0


def test_what_padding_holds_does_not_matter():
    layer, (x, mask) = make_layer(eval_capacity_factor=1.0), make_inputs(4, 9)
    changed = np.where(mask[..., None], x, 1e3).astype("float32")
    np.testing.assert_array_equal(layer(changed, padding_mask=mask), layer(x, padding_mask=mask))


def test_later_tokens_do_not_change_earlier_ones():
    layer, (x, _) = make_layer(eval_capacity_factor=0.7), make_inputs(1, 12)
    outputs = layer(x).numpy()
    for position in range(1, 12):
        changed = x.copy()
        changed[:, position:] *= -1
        np.testing.assert_array_equal(layer(changed).numpy()[:, :position], outputs[:, :position])


def test_jitter_is_the_routers_alone():
    # With one expert the gate is 1 whatever the router sees; the experts get the inputs as they are.
    layer, (x, _) = make_layer(1, jitter_noise=0.5), make_inputs()
    np.testing.assert_array_equal(layer(x, training=True), layer(x, training=False))


def test_jitter_changes_gates_in_training_only():
    layer, (x, _) = make_layer(jitter_noise=0.1, train_capacity_factor=3.0, eval_capacity_factor=3.0), make_inputs()
    np.testing.assert_array_equal(layer(x), layer(x))
    assert np.abs(layer(x, training=True) - layer(x)).max() > 1e-4


def test_expert_dropout_is_elementwise_and_in_training_only():
    # One expert of the identity on positive inputs: what is zero was dropped.
    layer = SwitchFeedForward(1, d_ff=50, expert_dropout_rate=0.4, train_capacity_factor=1.0)
    layer.build((None, None, 50))
    layer.experts.input_kernels[0].assign(np.eye(50)[None])
    layer.experts.wo.assign(np.eye(50)[None])
    x = np.ones((3, 8, 50), "float32")
    # The gate is the probability of an only expert, which some processors round to 1 - 2^-24.
    np.testing.assert_allclose(layer(x), x, rtol=1e-7)
    with random.random_seed(0):
        dropped = layer(x, training=True).numpy() == 0
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


def test_the_whole_batch_and_its_parts_route_and_drop_out_alike():
    layer = make_layer(num_groups_multiple=4, train_capacity_factor=0.8, jitter_noise=0.3, expert_dropout_rate=0.3)
    x, mask = make_inputs(8, 6)
    with random.random_seed(5):
        whole, stats = layer.forward(x, padding_mask=mask, training=True)
        parts = []
        for index in range(4):
            rows = slice(2 * index, 2 * index + 2)
            with partitioning.part_of_batch(4, index):
                parts.append(layer.forward(x[rows], padding_mask=mask[rows], training=True))
    np.testing.assert_allclose(np.concatenate([outputs for outputs, _ in parts]), whole, rtol=1e-6, atol=1e-6)
    merged = parts[0][1]
    for _, more in parts[1:]:
        merged = merged.merge(more)
    for name, mine, theirs in zip(stats._fields, merged, stats, strict=True):
        np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(mine.weight, theirs.weight, err_msg=name)


# Equivalence.


@pytest.mark.parametrize("dispatch_name", ["einsum", "index"])
@pytest.mark.parametrize("num_groups, factor, capacity", [
    # 24 tokens and 3 experts: 24 * 0.5 / 3 = 4; groups of 6: 6 * 1.0 / 3 = 2; enough for all: 3 * 24 / 3 = 24
    (1, 0.5, 4), (4, 1.0, 2), (1, 3.0, 24)])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(num_groups, factor, capacity, dispatch_name):
    layer = make_layer(num_groups_multiple=num_groups, train_capacity_factor=factor, jitter_noise=0.0,
                       dispatch=dispatch_name)
    x, mask = make_inputs(4, 6)
    target = np.random.RandomState(2).randn(*x.shape)

    def run(function, x, weights, dtype):
        x = tf.constant(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            outputs, aside = function(x)
            loss = tf.reduce_sum((outputs - tf.constant(target, dtype)) ** 2)
        return outputs.numpy(), aside, [gradient.numpy() for gradient in tape.gradient(loss, [x, *weights])]

    outputs, stats, gradients = run(
        lambda x: layer.forward(x, padding_mask=mask, training=True), x, weights_of(layer), tf.float32)
    weights = [tf.cast(weight, tf.float64) for weight in weights_of(layer)]
    expected, num_dropped, expected_gradients = run(
        lambda x: naive_switch(x, mask, num_groups, capacity, *weights), x, weights, tf.float64)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    assert stats.fraction_tokens_dropped.total == num_dropped
    assert (num_dropped > 0) == (factor < 3)
    for name, mine, theirs in zip(("inputs", "router", "wi", "wo"), gradients, expected_gradients, strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize("dispatch_name", ["einsum", "index"])
def test_one_expert_is_the_dense_layer_in_values_and_gradients(activation, dispatch_name):
    layer = make_layer(1, activation=activation, dispatch=dispatch_name, train_capacity_factor=1.0, group_size=6)
    dense = FeedForward(D_FF, activation)
    dense.build((None, None, D_MODEL))
    for mine, stacked in zip(dense.weights, layer.experts.weights, strict=True):
        mine.assign(stacked[0])
    x = tf.constant(make_inputs(3, 4)[0])
    results = []
    for either in (layer, dense):
        kernels = [weight.value for weight in (either.experts if either is layer else either).weights]
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = either(x, training=True)
            loss = tf.reduce_sum(outputs**3)
        results.append([outputs, *(tf.squeeze(gradient) for gradient in tape.gradient(loss, [x, *kernels]))])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-4)


def test_both_dispatches_agree_in_the_whole_layer():
    x, mask = make_inputs(4, 6)
    results = []
    for name in ("einsum", "index"):
        layer = make_layer(train_capacity_factor=0.8, dispatch=name, name="same")
        with random.random_seed(1), tf.GradientTape() as tape:
            outputs, stats = layer.forward(x, padding_mask=mask, training=True)
            loss = tf.reduce_sum(outputs**2) + stats.load_balancing_loss.value
        results.append([outputs, *tape.gradient(loss, weights_of(layer))])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch_name", ["einsum", "index"])
def test_an_unknown_batch_gives_the_same_numbers(dispatch_name):
    # Multiples of 8 tokens, and others, which are filled up with masked tokens.
    layer = make_layer(num_groups_multiple=8, eval_capacity_factor=1.0, group_size=5, dispatch=dispatch_name)
    signature = [tf.TensorSpec([None, None, D_MODEL]), tf.TensorSpec([None, None], tf.bool)]
    dynamic = tf.function(lambda x, mask: layer.forward(x, padding_mask=mask), input_signature=signature)
    for batch, length in ((4, 6), (3, 5), (1, 1)):
        x, mask = make_inputs(batch, length, share_real=0.9)
        outputs, stats = dynamic(x, mask)
        expected, expected_stats = layer.forward(x, padding_mask=mask)
        np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(stats, expected_stats, strict=True):
            np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-6)
            np.testing.assert_allclose(mine.weight, theirs.weight)


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
    layer = SwitchFeedForward(2, d_ff=1, semantics="hf", expert_capacity=2, num_groups_multiple=64, jitter_noise=0.0)
    layer.build((None, None, 1))
    layer.router.kernel.assign([[1.0, 0.0]])
    layer.experts.input_kernels[0].assign(np.ones((2, 1, 1)))
    layer.experts.wo.assign(np.ones((2, 1, 1)))
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


# Refusals.


@pytest.mark.parametrize("arguments, message", [
    ({"num_experts": 0}, "num_experts must be an integer of at least 1, not 0"),
    ({"d_ff": 0}, "d_ff must be an integer of at least 1, not 0"),
    ({"group_size": 0}, "group_size must be an integer of at least 1, not 0"),
    ({"num_groups_multiple": 2.0}, r"num_groups_multiple must be an integer of at least 1, not 2\.0"),
    # Without slots every token would be dropped, silently.
    ({"min_expert_capacity": 0}, "min_expert_capacity must be an integer of at least 1, not 0"),
    ({"semantics": "hf", "expert_capacity": 0}, "expert_capacity must be an integer of at least 1, not 0"),
    ({"train_capacity_factor": 0}, r"train_capacity_factor must be a number in \[1e-6, 1e6\], not 0"),
    ({"eval_capacity_factor": -1.0}, r"eval_capacity_factor must be a number in \[1e-6, 1e6\], not -1\.0"),
    ({"expert_capacity": 4}, "expert_capacity=4 belongs to a sparse model with semantics='hf'"),
    ({"semantics": "hf"}, "expert_capacity must be an integer of at least 1, not None"),
    ({"dispatch": "indx"}, r"dispatch must be one of 'auto', .*, 'ragged', not 'indx'\. Did you mean 'index'\?"),
    ({"semantics": "switch-tf"}, r"semantics must be one of .* Did you mean 'switch_tf'\?"),
    ({"activation": "swish"}, "activation must be one of 'relu', .*, not 'swish'"),
    ({"router_dtype": "float16"}, "router_dtype must be one of 'float32', 'bfloat16', not 'float16'"),
    ({"jitter_noise": 1.5}, r"jitter_noise must be a number in \[0, 1\), not 1\.5"),
    ({"expert_dropout_rate": 1.0}, r"expert_dropout_rate must be a number in \[0, 1\), not 1\.0"),
])
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SwitchFeedForward(**{"num_experts": 2, "d_ff": 3, **arguments})


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
