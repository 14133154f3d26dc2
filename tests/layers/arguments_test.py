"""Refusals of layers in one sentence each, their configurations, and Keras' own mask."""

import os
import re
import subprocess
import sys
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf.configs.semantics import Grouping
from switch_tf.layers import (
    Dropout,
    ExpertFeedForward,
    FeedForward,
    LogitsDense,
    MultiHeadAttention,
    RelativePositionBias,
    RMSNorm,
    Router,
    SwitchFeedForward,
    SwitchSelfAttention,
    TokenEmbedding,
    grouping,
)

D_MODEL = 8
INPUTS = np.random.RandomState(0).randn(2, 5, D_MODEL).astype("float32")
IS_REAL = np.array([[True, True, True, False, False], [True, True, True, True, False]])
NAN, INF = float("nan"), float("inf")


def make_switch(**changes):
    # Slots for every token, so that nothing but padding is dropped.
    return SwitchFeedForward(**{"num_experts": 2, "d_ff": 4, "train_capacity_factor": 2.0, **changes})


def make_switch_attention(**changes):
    experts = [make_switch(output_dim=4, name=name) for name in ("query", "key_value")]
    return SwitchSelfAttention(**{"query_experts": experts[0], "key_value_experts": experts[1], "num_heads": 2,
                                  "d_kv": 2, **changes})


def refusal(call):
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


# Values.


attention, embedding, experts, bias, router = (
    partial(MultiHeadAttention, num_heads=2, d_kv=3), partial(TokenEmbedding, vocab_size=7, d_model=3),
    partial(ExpertFeedForward, num_experts=2, d_ff=3), partial(RelativePositionBias, num_heads=2), partial(Router, 4))
dense, of_hf, causal, to_logits = partial(FeedForward, d_ff=3), partial(make_switch, semantics="hf"), partial(
    bias, is_bidirectional=False), partial(LogitsDense, vocab_size=7)
REFUSED = {
    "an integer of at least 1": [
        (make_switch, "num_experts", True, 0), (make_switch, "d_ff", 0), (make_switch, "output_dim", 0),
        # Without slots every token would be dropped, silently.
        (make_switch, "min_expert_capacity", 0), (make_switch, "group_size", 0),
        (make_switch, "num_groups_multiple", 2.0), (of_hf, "expert_capacity", 0, None), (Router, "num_experts", 0),
        (partial(router, policy="top_n"), "num_selected_experts", True), (experts, "d_ff", 0),
        (make_switch_attention, "d_kv", 2.0), (attention, "num_heads", 0), (attention, "d_kv", 2.0), (dense, "d_ff", 0),
        (LogitsDense, "vocab_size", 7.0), (embedding, "vocab_size", 0), (embedding, "d_model", True),
        (bias, "num_heads", 0)],
    # 8 of 32 buckets are exact in each direction, or 16 in a single direction; the rest are logarithmic.
    "an integer of at least 9": [(bias, "max_distance", 8)],
    "an integer of at least 17": [(causal, "max_distance", 16)],
    "an integer of at least 4": [(bias, "num_buckets", 3)], "an integer of at least 2": [(causal, "num_buckets", 1)],
    "True or False": [(bias, "is_bidirectional", "decoder")],
    "an integer of at most 2147483647": [(make_switch, "group_size", 2**31)],
    "an integer of at least 0": [(partial(Dropout, 0.1), "broadcast_axis", "length")],
    "a number 0 or above": [
        (make_switch, "load_balancing_loss_weight", NAN), (make_switch, "router_z_loss_weight", -1),
        (partial(router, policy="top2"), "second_place_loss_weight", NAN)],
    "a number above 0": [
        (make_switch, "init_scale", INF), (router, "init_scale", -1.0), (make_switch_attention, "init_scale", NAN),
        (attention, "init_scale", 0), (dense, "init_scale", -1.0), (to_logits, "init_scale", INF),
        (RMSNorm, "epsilon", 0, -1e-6, NAN, "small")],
    "a number that float32 can hold, from 1.2e-38 to 3.4e+38": [(RMSNorm, "epsilon", 1e-300)],
    "a number in [1e-6, 1e6]": [
        (make_switch, "train_capacity_factor", 1e400, 0), (make_switch, "eval_capacity_factor", "2", -1.0)],
    "a number in [0, 1)": [
        (make_switch, "jitter_noise", 1.5), (make_switch, "expert_dropout_rate", 1.0),
        (router, "jitter_noise", 1.0, -0.1), (experts, "dropout_rate", NAN), (attention, "dropout_rate", NAN),
        (dense, "dropout_rate", 1.5), (Dropout, "rate", 1.0, 1.5, -0.1, 2, True, NAN)],
    "a number in (0, 1)": [(router, "second_expert_threshold", True)],
    "a Router or the name of a policy": [(make_switch, "router", 3)],
    "a SwitchFeedForward": [(make_switch_attention, "query_experts", "query")]}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_no_layer_can_use_is_refused_when_it_is_made(rule):
    for make, name, *values in REFUSED[rule]:
        for value in values:
            sentence = f"{'A dropout rate' if name == 'rate' else name} must be {rule}, not {value!r}."
            assert refusal(partial(make, **{name: value})) == sentence


@pytest.mark.parametrize("make, arguments, message", [
    (make_switch, {"expert_capacity": 4}, "expert_capacity=4 belongs to a sparse model with semantics='hf'"),
    (make_switch, {"dispatch": "einsun"},
     r"dispatch must be one of 'auto', 'einsum', 'index', 'ragged', not 'einsun'\. Did you mean 'einsum'\?"),
    (make_switch, {"semantics": "switch-tf"}, r"semantics must be one of .* Did you mean 'switch_tf'\?"),
    (router, {"semantics": "t5"}, "semantics must be one of 'switch_tf', 'mtf', 't5x', 'hf', not 't5'"),
    (make_switch, {"activation": "swish"}, "activation must be one of 'relu', .*, not 'swish'"),
    (experts, {"activation": "rellu"}, r"activation must be one of 'relu', .*, not 'rellu'\. Did you mean"),
    (dense, {"activation": "gegluu"}, r"activation must be one of 'relu', .*, not 'gegluu'\. Did you mean 'geglu'"),
    *((make, {"router_dtype": "float16"}, "router_dtype must be one of 'float32', 'bfloat16', not 'float16'")
      for make in (make_switch, router)),
    (router, {"policy": "swich"}, r"policy must be one of 'switch', .* or .*, not 'swich'\. Did you mean 'switch'\?"),
    (router, {"num_selected_experts": 2}, "The switch policy selects 1 expert for each token, not 2"),
    *((make_switch_attention, {"query_experts": make_switch(output_dim=width, name="query")},
       rf"query_experts must have output_dim=4 \(num_heads \* d_kv\), not {width}") for width in (None, 6)),
    (make_switch_attention, {"query_experts": make_switch(output_dim=4, name="key_value")},
     "query_experts and key_value_experts are both named 'key_value'; make two layers"),
])
def test_a_refusal_says_what_there_is(make, arguments, message):
    assert re.search(message, refusal(partial(make, **arguments)))


# Serialisation.


@pytest.mark.parametrize("make, arguments", [
    (MultiHeadAttention, {"num_heads": 2, "d_kv": 3, "dropout_rate": 0.2, "init_scale": 0.5}),
    (Dropout, {"rate": 0.3, "broadcast_axis": 2}), (TokenEmbedding, {"vocab_size": 7, "d_model": 3}),
    (LogitsDense, {"vocab_size": 7, "init_scale": 0.5}), (RMSNorm, {"epsilon": 0.25}),
    *((make, {"d_ff": 3, "activation": "geglu", "dropout_rate": 0.2, "init_scale": 0.5, **more})
      for make, more in ((FeedForward, {}), (ExpertFeedForward, {"num_experts": 2}))),
    (RelativePositionBias, {"num_heads": 3, "num_buckets": 8, "max_distance": 20, "is_bidirectional": False}),
    (Router, {"num_experts": 3, "num_selected_experts": 1, "policy": "switch", "jitter_noise": 0.2,
              "router_dtype": "bfloat16", "init_scale": 0.5, "semantics": "mtf"}),
    (SwitchFeedForward, {
        "num_experts": 2, "d_ff": 3, "activation": "geglu", "group_size": 7, "num_groups_multiple": 2,
        "jitter_noise": 0.2, "train_capacity_factor": 1.5, "eval_capacity_factor": 2.5, "min_expert_capacity": 3,
        "expert_dropout_rate": 0.3, "load_balancing_loss_weight": 0.1, "router_z_loss_weight": 0.2,
        "router_dtype": "bfloat16", "init_scale": 0.5, "semantics": "hf", "expert_capacity": 5, "dispatch": "einsum"}),
])
def test_a_layers_config_makes_it_again(make, arguments):
    config = make(**arguments, name="mine", dtype="mixed_bfloat16").get_config()
    again = make.from_config(config)
    assert again.get_config() == config
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert (again.name, again.dtype_policy.name) == ("mine", "mixed_bfloat16")
    if make is SwitchFeedForward:  # its parts get what is theirs
        router, experts = again.router, again.experts
        assert (router.jitter_noise, router.router_dtype) == (0.2, "bfloat16")
        assert (router.init_scale, router.semantics) == (0.5, "hf")
        assert (experts.activation, experts.dropout_rate, experts.init_scale) == ("geglu", 0.3, 0.5)
        assert {part.dtype_policy.name for part in (router, experts)} == {"mixed_bfloat16"}


def test_numbers_of_numpy_make_the_same_layers_as_pythons():
    numpys = make_switch(num_experts=np.int64(2), group_size=np.int32(16), init_scale=np.float32(0.5),
                         name=(name := "switch"))
    pythons = make_switch(group_size=16, init_scale=0.5, name=name)
    numpys.router.name = pythons.router.name
    assert numpys.get_config() == pythons.get_config()
    assert make_switch_attention(num_heads=np.int8(2)).num_heads == 2


def test_a_capacity_in_the_graph_is_that_of_python_for_factors_of_many_digits():
    # 100,000 tokens * 0.30000000000000004 / 3 experts = 10,000 slots; in int64 the exact product overflows.
    sizes = Grouping(3, train_capacity_factor=0.1 + 0.2, min_expert_capacity=1)
    in_graph = tf.function(lambda tokens: grouping.expert_capacity(tokens, sizes, training=True))
    assert grouping.expert_capacity(100_000, sizes, training=True) == 10_000
    assert int(in_graph(tf.constant(100_000))) == 10_000


# Inputs.


def test_a_layers_own_sentence_is_all_that_a_call_says():
    sentence = refusal(lambda: make_switch()(INPUTS, padding_mask=IS_REAL.T))
    assert sentence == "padding_mask must be <bool>[2, 5], not <bool>[5, 2]."
    of_a_layer_in_it = refusal(lambda: make_switch_attention()(INPUTS, padding_mask=IS_REAL, token_ids=INPUTS[..., 0]))
    assert of_a_layer_in_it == "token_ids must be <int>[2, 5], not <float32>[2, 5]."


LAYERS = {"switch": make_switch, "switch_attention": make_switch_attention, "feed_forward": lambda: FeedForward(4),
          "attention": lambda: MultiHeadAttention(2, 2), "logits": lambda: LogitsDense(7)}


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_of_another_kind_or_rank_are_refused(name):
    layer = LAYERS[name]()
    three = "inputs must have 3 dimensions, the last one of a known length, not the shape "
    assert refusal(lambda: layer(INPUTS[0])) == f"{three}[5, 8]."
    assert refusal(lambda: layer(INPUTS[None])) == f"{three}[1, 2, 5, 8]."
    layer(INPUTS)
    for wrong, found in ((INPUTS[0], "<float32>[5, 8]"), (INPUTS[..., :4], "<float32>[2, 5, 4]"),
                         (INPUTS.astype("int32"), "<int32>[2, 5, 8]"), (INPUTS > 0, "<bool>[2, 5, 8]")):
        assert refusal(lambda wrong=wrong: layer(wrong)) == f"inputs must be <float>[any, any, 8], not {found}."


@pytest.mark.parametrize("name", ["switch", "switch_attention", "router"])
@pytest.mark.parametrize("mask, found", [
    (IS_REAL.T, "<bool>[5, 2]"), (IS_REAL[..., None], "<bool>[2, 5, 1]"), (IS_REAL[:, :4], "<bool>[2, 4]"),
    (np.full((2, 5), 0.5, "float32"), "<float32>[2, 5]"), (IS_REAL.astype("int32"), "<int32>[2, 5]"),
    ([[1, 1, 1, 0, 0]] * 2, "<int32>[2, 5]")])
def test_masks_of_another_shape_or_kind_are_refused(name, mask, found):
    layer, options = (Router(2), {"expert_capacity": 4}) if name == "router" else (LAYERS[name](), {})
    sentence = refusal(lambda: layer(INPUTS, padding_mask=mask, **options))
    assert sentence == f"padding_mask must be <bool>[2, 5], not {found}."


def test_other_arguments_of_a_call_are_checked():
    attention = MultiHeadAttention(2, 2)
    for call, sentence in (
            (lambda: make_switch()(INPUTS, training="no"), "training must be True or False, not 'no'."),
            (lambda: Dropout(0.5)(INPUTS, training="no"), "training must be True or False, not 'no'."),
            (lambda: make_switch()(INPUTS, return_router_stats=1), "return_router_stats must be True or False, not 1."),
            (lambda: make_switch()(INPUTS, token_ids=INPUTS[..., 0]),
             "token_ids must be <int>[2, 5], not <float32>[2, 5]."),
            (lambda: Router(2)(INPUTS), "expert_capacity must be an integer of at least 1, not None."),
            (lambda: Router(2)(INPUTS, expert_capacity=np.array([1, 2], "int32")),
             "expert_capacity must be <int>[], not <int32>[2]."),
            (lambda: attention(INPUTS, attention_mask=IS_REAL),
             "attention_mask must be <bool>[2, 1, 5, 5], not <bool>[2, 5]."),
            (lambda: attention(INPUTS, inputs_kv=INPUTS[:1]),
             "inputs_kv must be <float>[2, any, 8], not <float32>[1, 5, 8]."),
            (lambda: attention(INPUTS, position_bias=np.zeros((1, 3, 5, 5), "float32")),
             "position_bias must be <float>[1, 2, 5, 5], not <float32>[1, 3, 5, 5]."),
            (lambda: Dropout(0.5, broadcast_axis=3)(INPUTS, training=True),
             "broadcast_axis must be below 3, the number of dimensions of the inputs, not 3."),
            (lambda: RelativePositionBias(2)(query_length=0, key_length=3),
             "query_length must be an integer of at least 1, not 0.")):
        assert refusal(call) == sentence


def test_token_ids_outside_of_the_vocabulary_are_refused():
    embed = TokenEmbedding(10, 4)
    for token in (-1, 10):
        sentence = refusal(lambda token=token: embed(np.array([[3, token]])))
        assert sentence == f"token_ids must be in [0, 10), not {token}."
    assert embed(np.array([[0, 9]])).shape == embed(np.zeros((1, 0), "int32")).shape[:1] + (2, 4)
    assert refusal(lambda: embed(np.array([3], "int32"))) == "token_ids must be <int>[any, any], not <int32>[1]."


# Keras' own mask.


def embedded(width=D_MODEL):
    """A model from token ids to a sequence of vectors that carries Keras' mask of the ids that are not 0."""
    ids = keras.Input((5,), dtype="int32")
    return ids, keras.layers.Embedding(20, width, mask_zero=True)(ids)


IDS = np.array([[3, 4, 5, 0, 0], [6, 7, 8, 9, 0]])


def test_keras_mask_is_the_padding_mask_and_is_passed_on():
    embed, switch = keras.layers.Embedding(20, D_MODEL, mask_zero=True), make_switch()
    x = embed(IDS)
    outputs, stats = switch.forward(x)
    np.testing.assert_array_equal(keras.src.backend.get_keras_mask(outputs), IS_REAL)
    expected, expected_stats = switch.forward(np.asarray(x), padding_mask=IS_REAL)
    np.testing.assert_array_equal(outputs, expected)
    assert float(stats.router_entropy.weight) == float(expected_stats.router_entropy.weight) == IS_REAL.sum()
    with pytest.raises(TypeError):
        switch.forward(x, *[None] * 9)
    # The caller's own word is the last.
    _, stats = switch.forward(x, padding_mask=np.ones((2, 5), bool))
    assert float(stats.router_entropy.weight) == 10


def test_keras_mask_comes_through_where_a_call_has_several_tensors():
    embed, switch = keras.layers.Embedding(20, D_MODEL, mask_zero=True), make_switch(router="hash")
    outputs, stats = switch.forward(embed(IDS), token_ids=IDS)
    assert float(stats.expert_load.weight) == IS_REAL.sum()
    assert not np.asarray(outputs)[~IS_REAL].any()


@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(2, 2), make_switch_attention])
def test_nobody_looks_at_keys_that_keras_masks(make):
    layer, embed = make(), keras.layers.Embedding(20, D_MODEL, mask_zero=True)
    outputs = np.asarray(layer(embed(IDS)))
    changed = np.where(IDS == 0, 13, IDS)
    x = keras.layers.Masking()(np.where(IS_REAL[..., None], np.asarray(embed(IDS)), 0.0))
    np.testing.assert_array_equal(np.asarray(layer(x))[IS_REAL], outputs[IS_REAL])
    unmasked = np.asarray(layer(np.asarray(embed(changed))))
    assert np.abs(unmasked - outputs)[IS_REAL].max() > 1e-5


def test_a_layer_after_another_still_sees_the_mask_in_a_functional_model_that_is_saved_and_loaded(tmp_path):
    ids, x = embedded()
    x = RMSNorm()(x)
    x = Dropout(0.1)(x)
    # Keras carries masks from layer to layer; its `+` of two tensors drops them.
    x = keras.layers.Add()([x, MultiHeadAttention(2, 2)(x)])
    x = FeedForward(6, "geglu")(x)
    x = keras.layers.Add()([x, make_switch(name="first", activation="geglu")(x)])
    outputs = make_switch(name="second", activation="geglu")(x)
    model = keras.Model(ids, LogitsDense(7)(outputs))
    found = np.asarray(model(IDS))
    # Without a mask the second layer would route padding, and its logits would not be zero.
    assert not found[~IS_REAL].any()
    assert (np.abs(found[IS_REAL]).max(axis=-1) > 0).all()
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(IDS), found)


def test_a_symbolic_mask_of_another_kind_is_refused_where_the_model_is_made():
    x, mask = keras.Input((5, D_MODEL)), keras.Input((5,), dtype="float32")
    for layer in (make_switch(), make_switch_attention()):
        sentence = refusal(lambda layer=layer: layer(x, padding_mask=mask))
        assert sentence == "padding_mask must be <bool>[any, 5], not <float32>[any, 5]."
    is_real = keras.Input((5,), dtype="bool")
    model = keras.Model([x, is_real], make_switch()(x, padding_mask=is_real))
    assert not np.asarray(model([INPUTS, IS_REAL]))[~IS_REAL].any()


@pytest.mark.slow
def test_all_of_this_holds_on_keras_jax_back_end():
    environ = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__, "-k", "not graph"], env=environ,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
