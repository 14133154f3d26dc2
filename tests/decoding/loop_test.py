"""Decoding with a cache, compared with recomputing the whole sequence for every token by a model that has room."""

import dataclasses
import types

import numpy as np
import pytest
from keras import ops

from switch_tf import SwitchConfig, SwitchTransformer, context, decoding
from switch_tf.configs import policies
from switch_tf.ops import forms

LENGTH = 5
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.integers(2, 32, (4, 7)).astype("int32")
INPUTS[1, 5:] = 0
INPUTS[3, 2:] = 0
TARGETS = RANDOM.integers(2, 32, (4, LENGTH)).astype("int32")
UNTIED = {"logits_via_embedding": False, "scale_decoder_outputs": False}  # tied, small models repeat themselves
# For what does not depend on the number of layers.
SHALLOW = {**UNTIED, "num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_sparse_step": 1,
           "decoder_sparse_step": 1}

VARIANTS = {
    "switch": {},
    "geglu_untied": {"activation": "geglu", **UNTIED},
    "hash": {"routing_policy": "hash"},
    "top2": {"routing_policy": "top2", "allow_non_causal_decoder": True},
    "attention_experts": {"expert_sublayers": "feed_forward_and_attention", "decoder_sparse_step": 1},
    "t5x": {"semantics": "t5x"},
    "hf": {"semantics": "hf", "expert_capacity": 100},
    "top_n": {"routing_policy": "top_n", "num_selected_experts": 3, "allow_non_causal_decoder": True},
    "ntlb": {"routing_policy": "ntlb", "allow_non_causal_decoder": True},
    "batch_prioritized": {"routing_policy": "batch_prioritized", "allow_non_causal_decoder": True},
    "sinkhorn": {"routing_policy": "sinkhorn", "allow_non_causal_decoder": True},
    "every_layer_is_sparse": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "extra_mlp": {"extra_mlp": True, "decoder_sparse_step": 1},
    "mtf": {"semantics": "mtf"},
    "bias_per_layer": {"relative_attention_per_layer": True},
    "einsum": {"dispatch": "einsum"},
}
QUICK = ("switch", "geglu_untied")
BY_COST = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in VARIANTS]


def with_room(model):
    """Returns a copy of the model with an expert slot for every token in its configuration."""
    twin = SwitchTransformer(dataclasses.replace(model.config, eval_capacity_factor=4.0 * model.config.num_experts),
                             dtype=model.dtype_policy)
    twin.build()
    for mine, theirs in zip(twin.variables, model.variables, strict=True):
        mine.assign(theirs)
    return twin


def in_one_pass(model, inputs, targets):
    """Logits of every place where the tokens before it are given: <float32>[batch, length, vocab]."""
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    return ops.convert_to_numpy(
        model.forward({"encoder_input_tokens": inputs, "decoder_input_tokens": shifted})[0])


def step_by_step(model, inputs, targets):
    """Returns the same logits, decoded one token per step."""
    with context.within(no_drop=True):
        cross_cache, cache = model.prefill({"encoder_input_tokens": inputs}, targets.shape[1])
        last, found = np.zeros(len(inputs), "int32"), []
        for position in range(targets.shape[1]):
            logits, cache = model.decode_step(last, np.ones(len(inputs), "bool"), cache, position, cross_cache)
            found.append(ops.convert_to_numpy(logits))
            last = targets[:, position]
    return np.stack(found, axis=1)


def recompute(model, inputs, max_length):
    """Greedy decoding by whole passes alone, that do not end."""
    ids = np.zeros((len(inputs), max_length), "int32")
    for place in range(max_length):
        ids[:, place] = in_one_pass(model, inputs, ids)[:, place].argmax(-1)
    return ids


def greedy(model, inputs, max_length=LENGTH, end_id=decoding.END_ID):
    decoded = decoding.Greedy().decode(model, {"encoder_input_tokens": inputs}, max_length, end_id)
    return ops.convert_to_numpy(decoded.ids[:, 0])


def cut(ids):
    """Zeros after the first end of each sequence."""
    is_after = np.cumsum(ids == decoding.END_ID, axis=1) - (ids == decoding.END_ID) > 0
    return np.where(is_after, 0, ids)


def test_every_policy_whose_experts_do_not_choose_is_among_the_variants():
    tested = {SwitchConfig(num_experts=4, **changes).decoder_policy for changes in VARIANTS.values()}
    assert tested == {name for name in policies.names() if not policies.get(name).experts_choose}


@pytest.mark.parametrize("variant", BY_COST)
def test_each_step_has_the_logits_of_a_pass_over_the_whole_sequence(make_model, variant):
    model = make_model(**VARIANTS[variant])
    logits = in_one_pass(with_room(model), INPUTS, TARGETS)
    np.testing.assert_allclose(step_by_step(model, INPUTS, TARGETS), logits, atol=1e-5 * np.abs(logits).max())


def test_greedy_decoding_takes_the_best_token_of_each_pass(make_model):
    model = make_model(**UNTIED)
    ids = recompute(with_room(model), INPUTS, LENGTH)
    np.testing.assert_array_equal(greedy(model, INPUTS), cut(ids))
    assert len(np.unique(ids)) > 3  # not one token again and again


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_those_of_whole_passes_for_every_policy_and_alone_as_in_a_batch(make_model, variant, tied):
    model = make_model(**{**VARIANTS[variant], **({} if tied else UNTIED)})
    inputs = np.concatenate([INPUTS, RANDOM.integers(2, 32, (28, 7)).astype("int32")])
    together = greedy(model, inputs)
    np.testing.assert_array_equal(together[:4], cut(recompute(with_room(model), INPUTS, LENGTH)))
    for row in (0, 1, 3, 17):
        alone = np.pad(inputs[row][inputs[row] > 0], (0, 2))[None]
        np.testing.assert_array_equal(greedy(model, alone)[0], together[row])
    if not tied:
        assert len({tuple(ids) for ids in together}) > 8


IN_PROGRAMS = {"geglu_untied": (), "attention_experts": pytest.mark.slow}


@pytest.mark.parametrize("variant", [
    pytest.param(name, marks=IN_PROGRAMS.get(name, pytest.mark.exhaustive)) for name in VARIANTS])
def test_few_sequences_in_a_program_have_the_tokens_of_whole_passes(make_model, fusing, variant):
    # One layer encodes: what a program repeats and caches is the decoder.
    model = make_model(**{**VARIANTS[variant], **UNTIED, "num_encoder_layers": 1})
    expected = cut(recompute(with_room(model), INPUTS, LENGTH))
    for inputs in (INPUTS, INPUTS[:1]):  # products of one row have a form of their own
        ids = forms.compiled(lambda inputs: decoding.Greedy().ids(
            model, {"encoder_input_tokens": inputs}, LENGTH))(inputs)
        np.testing.assert_array_equal(ids, expected[:len(inputs)])


def test_a_score_is_the_likelihood_of_what_was_decoded_with_and_without_it(make_model):
    model = make_model(**UNTIED, num_encoder_layers=1)
    for sampler in (decoding.Greedy(), decoding.Sample(seed=1), decoding.Beam(2, length_penalty=0, num_results=2)):
        ids, scores = sampler.decode(model, {"encoder_input_tokens": INPUTS}, LENGTH)
        targets = ops.convert_to_numpy(ids[:, 0])
        np.testing.assert_array_equal(sampler.ids(model, {"encoder_input_tokens": INPUTS}, LENGTH), targets)
        features = {"encoder_input_tokens": INPUTS, "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
                    "decoder_target_tokens": targets, "decoder_loss_weights": (targets > 0).astype("int32")}
        # A draw may be of padding's id in the middle, which no target is.
        np.testing.assert_allclose(scores[:, 0], decoding.log_likelihoods(model, features), rtol=1e-5)


def test_steps_in_bfloat16_are_as_far_off_as_bfloat16_is(make_model):
    model = make_model("mixed_bfloat16")
    logits = in_one_pass(with_room(model), INPUTS, TARGETS)
    np.testing.assert_allclose(step_by_step(model, INPUTS, TARGETS), logits, atol=0.03 * np.abs(logits).max())


def test_hugging_faces_encoder_keeps_its_capacity_where_every_token_is_served(make_model):
    features = {"encoder_input_tokens": INPUTS, "decoder_input_tokens": INPUTS}
    outputs = {}
    for semantics in ({"semantics": "hf", "expert_capacity": 1}, {}):
        model = make_model(**semantics)
        with context.within(no_drop=True):
            logits, stats = model.forward(features)
        plain, _ = model.forward(features)
        outputs[len(semantics)] = float(stats[0].fraction_tokens_dropped.total), np.abs(logits - plain).max()
    dropped, difference = outputs[2]
    assert dropped > 0
    assert difference == 0
    dropped, difference = outputs[0]
    assert dropped == 0
    assert difference > 1e-3  # the configuration's own capacity drops tokens of this batch


@pytest.mark.parametrize("variant", ["switch", pytest.param("top2", marks=pytest.mark.slow)])
def test_a_row_is_decoded_alike_whatever_its_neighbours_and_its_padding(make_model, variant):
    model = make_model(**VARIANTS[variant], **UNTIED)
    together = greedy(model, INPUTS)
    for row, ids in zip(INPUTS[[0, 3]], together[[0, 3]], strict=True):
        np.testing.assert_array_equal(greedy(model, np.pad(row[row > 0], (0, 3))[None])[0], ids)


def test_a_sequence_ends_with_its_end_and_a_row_of_padding_has_none(fresh_model):
    model = fresh_model(**SHALLOW)
    inputs = np.concatenate([INPUTS, np.zeros_like(INPUTS[:1])])
    ids = greedy(model, inputs)
    kernel = model.logits_dense.kernel
    columns = ops.convert_to_numpy(kernel).copy()
    first, second = ids[0, :2]
    assert first != second
    columns[:, decoding.END_ID] = 1.001 * columns[:, second]  # wherever that token was the best, the end is now
    kernel.assign(columns)
    ended = greedy(model, inputs)
    assert list(greedy(model, inputs, end_id=int(first))[0]) == [first, 0, 0, 0, 0]
    assert list(ended[0]) == [first, decoding.END_ID, 0, 0, 0]
    assert not ended[4].any()


def test_likelihoods_are_sums_over_targets_of_what_the_logits_say(make_model):
    model = make_model()
    targets = TARGETS.copy()
    targets[2, 3:] = 0
    features = {"encoder_input_tokens": INPUTS, "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
                "decoder_target_tokens": targets, "decoder_loss_weights": (targets > 0).astype("int32")}
    logits = ops.convert_to_numpy(with_room(model).forward(features)[0]).astype("float64")
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [sum(np.log(probabilities[row, place, token]) for place, token in enumerate(targets[row]) if token)
                for row in range(4)]
    np.testing.assert_allclose(decoding.log_likelihoods(model, features), expected, rtol=1e-5)


@pytest.mark.parametrize("sampler", [decoding.Greedy(), decoding.Sample(), decoding.Beam()], ids=repr)
def test_scores_and_beams_are_refused_where_one_program_is_cut_over_devices(sampler, make_model):
    model = make_model()
    message = r"works on one device; .* Greedy\(\)\.ids decodes"
    annotator = types.SimpleNamespace(is_for_compiler=False)
    with context.within(annotator=annotator), pytest.raises(ValueError, match=message):
        sampler.decode(model, {"encoder_input_tokens": INPUTS}, 3)


@pytest.mark.parametrize("sampler", [decoding.Greedy(), decoding.Sample(), decoding.Beam()], ids=repr)
def test_what_cannot_be_decoded_is_refused(sampler, make_model):
    features, decode = {"encoder_input_tokens": INPUTS}, sampler.decode
    with pytest.raises(ValueError, match="no decoder"):
        decode(make_model(num_decoder_layers=0), features, 3)
    chosen = make_model(routing_policy="expert_choice", allow_non_causal_decoder=True)
    with pytest.raises(ValueError, match="'expert_choice'.*decoder_routing_policy='switch'"):
        decode(chosen, features, 3)
    with pytest.raises(ValueError, match="Packed"):
        decode(make_model(), {**features, "encoder_segment_ids": INPUTS}, 3)
    with pytest.raises(ValueError, match="max_length must be an integer of at least 1, not 0"):
        decode(make_model(), features, 0)
