"""Hugging Face's T5 and Switch Transformers, loaded here, give the same numbers in float32.

The checkpoints and numbers come from transformers itself (tests/golden/hugging_face.py). The bar, 1e-4 on logits of
standard deviation about 1, is what sums of a few dozen float32 terms in another order stay well below.
"""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import conversion, decoding, losses
from switch_tf.conversion import checkpoint_files
from switch_tf.conversion.huggingface import rules_of
from switch_tf.layers import dispatch
from switch_tf.models.switch_transformer import SwitchTransformer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
SPARSE_LAYERS = {
    "t5_1_0": ((), ()), "t5_1_1": ((), ()), "umt5": ((), ()), "switch": ((1, 3), (1,)), "switch_untied": ((1,), (1,)),
    "switch_step_1": ((0, 1), (0, 1)), "switch_step_4": ((1, 5), (1,))}
CASES = tuple(SPARSE_LAYERS)
TOLERANCE = 1e-4


@functools.cache
def load(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    features = {"encoder_input_tokens": expected["inputs"], "decoder_input_tokens": expected["decoder_inputs"],
                "decoder_target_tokens": expected["targets"]}
    return conversion.from_hugging_face(GOLDEN / case), features, expected


def largest_difference(ours, theirs):
    return float(np.max(np.abs(np.asarray(ours) - np.asarray(theirs))))


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    model, features, expected = load(case)
    is_real = expected["targets"] != 0
    assert not is_real.all() and (expected["inputs"] == 0).any()
    logits = model(features).numpy()
    difference = largest_difference(logits[is_real], expected["logits"][is_real])
    print(f"{case}: largest difference of logits {difference:.2e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("case, activation", [("encoder_gelu", "geglu_exact"), ("encoder_silu", "swiglu")])
def test_hidden_states_of_encoders(case, activation):
    model, expected = conversion.from_hugging_face(GOLDEN / case), np.load(GOLDEN / case / "expected.npz")
    assert (model.config.activation, model.config.num_decoder_layers) == (activation, 0)
    is_real = expected["inputs"] != 0
    hidden = model.encode({"encoder_input_tokens": expected["inputs"]}).numpy()
    assert largest_difference(hidden[is_real], expected["hidden"][is_real]) < 1e-5
    # Another form of gelu is further away than that.
    if activation == "geglu_exact":
        other = SwitchTransformer(dataclasses.replace(model.config, activation="geglu"))
        other.build()
        other.set_weights(model.get_weights())
        hidden = other.encode({"encoder_input_tokens": expected["inputs"]}).numpy()
        assert largest_difference(hidden[is_real], expected["hidden"][is_real]) > 1e-4


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case == "switch_untied" else [pytest.mark.slow]) for case in CASES])
def test_the_same_tokens_are_generated_greedily_and_by_beams(case):
    model, features, expected = load(case)
    inputs = features["encoder_input_tokens"]
    np.testing.assert_array_equal(model.generate(inputs, max_length=12), expected["greedy"])
    beam = decoding.Beam(4, length_penalty=0, num_results=4)
    ids, scores = beam.decode(model, {"encoder_input_tokens": inputs}, 12)
    np.testing.assert_array_equal(ids, expected["beam"])
    # Theirs sums over the whole sequence, and is off by as much as its logits.
    np.testing.assert_allclose(scores, expected["beam_scores"], rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("switch")])
def test_every_token_goes_to_the_same_expert_or_is_dropped(case):
    model, features, expected = load(case)
    assert (model.config.encoder_sparse_layers, model.config.decoder_sparse_layers) == SPARSE_LAYERS[case]
    decisions = []

    def create(made, name):
        decisions.append(made)
        return original(made, name)

    original = dispatch.create
    with mock.patch.object(dispatch, "create", create):
        model(features)
    assert len(decisions) == len(model.config.sparse_layer_names)
    num_encoder = len(model.config.encoder_sparse_layers)
    for index, made in enumerate(decisions):
        slot, expert = made.slot.numpy()[..., 0], made.expert_index.numpy()[..., 0]
        choices = np.where(slot < model.config.expert_capacity, expert, -1)
        # In the decoder, padding comes last and differs in what it attends to. It cannot take a real token's slot.
        is_compared = np.ones_like(choices, bool) if index < num_encoder else expected["targets"] != 0
        np.testing.assert_array_equal(choices[is_compared], expected[f"choices/{index}"][is_compared])
    assert case == "switch_step_1" or all((expected[f"choices/{i}"] < 0).mean() > 0.4 for i in range(len(decisions)))


@pytest.mark.parametrize("case", ["t5_1_0", "switch"])
def test_gradients(case):
    model, features, expected = load(case)
    with tf.GradientTape() as tape:
        loss = losses.cross_entropy(model(features), expected["targets"], expected["targets"] != 0, z_loss_weight=0)[0]
        loss = loss.value
    assert largest_difference(loss, expected["loss"]) < 1e-5
    variables = {variable.path.partition("/")[2]: variable for variable in model.weights}
    gradients = dict(zip(variables, tape.gradient(loss, [v.value for v in variables.values()]), strict=True))
    rules = rules_of(model.config)
    links = rules.link(variables)
    theirs = {name: part for link in links for name, part in link.to_theirs(gradients[link.ours].numpy())}
    names = [key for key in expected.files if key.startswith("gradients/")]
    assert names
    for key in names:
        difference = largest_difference(theirs[key.removeprefix("gradients/")], expected[key])
        print(f"{case}: {key} {difference:.2e} of {np.abs(expected[key]).max():.2e}")
        assert np.abs(expected[key]).max() > 1e-3
        assert difference < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_bit(case, tmp_path):
    model, features, _ = load(case)
    conversion.to_hugging_face(model, tmp_path / "out")
    theirs = checkpoint_files.open_folder(GOLDEN / case)
    written = checkpoint_files.open_folder(tmp_path / "out")
    if case == "t5_1_0":
        # A file by torch.save lists the embedding under each name that is tied to it.
        assert set(theirs) - set(written) == {"lm_head.weight", "encoder.embed_tokens.weight",
                                              "decoder.embed_tokens.weight"}
    else:
        assert set(written) == set(theirs)
    for name in written:
        np.testing.assert_array_equal(written[name].read(), theirs[name].read())
    again = conversion.from_hugging_face(tmp_path / "out")
    assert again.config == model.config
    np.testing.assert_array_equal(again(features).numpy(), model(features).numpy())


@pytest.mark.parametrize("case", CASES)
def test_written_config_says_what_theirs_says(case, tmp_path):
    conversion.to_hugging_face(load(case)[0], tmp_path / "out")
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / case, tmp_path / "out"))
    # Facts of transformers' base class with their default values, and of its version.
    for key in ("transformers_version", "add_cross_attention", "bos_token_id", "is_decoder", "classifier_dropout"):
        theirs.pop(key, None)
    if case == "t5_1_1":
        # transformers 5 writes True here and means scale_decoder_outputs; transformers 4 reads False as "untied".
        assert theirs.pop("tie_word_embeddings") is True and ours["tie_word_embeddings"] is False
    if case == "switch_step_4":
        # It asked for no sparse decoder layer and got one, which is what is written.
        assert theirs.pop("num_sparse_decoder_layers") == 0 and ours["num_sparse_decoder_layers"] == 1
    assert {key: ours.get(key) for key in theirs} == {**theirs, **({"dtype": "float32"} if "dtype" in theirs else {})}
