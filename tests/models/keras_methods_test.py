"""Keras' own methods on the model: export, summary, presets, and sentences where it cannot do what KerasHub's do."""

import copy
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from tests.models.conftest import SHALLOW

ENCODER = {**SHALLOW, "num_decoder_layers": 0}
SHAPES = {"token_embedder": 16, "encoder": 16, "layers_0": 16, "decoder": 16, "logits_dense": 32}


def serve(model, folder, features, **options):
    """Exports, loads and calls the program, with fewer rows and columns than the model was called with."""
    model.export(folder, verbose=False, **options)
    loaded = tf.saved_model.load(folder)
    return loaded.serve({name: value[:2, :5] for name, value in features.items()})


# Before a call, only the required features are known; after it, those that the model was called with.
def test_a_loaded_model_exports_the_forward_pass(make_model, features, tmp_path):
    model = make_model(**ENCODER)
    model.save(tmp_path / "model.keras")
    required = {"encoder_input_tokens": features["encoder_input_tokens"]}
    served = serve(keras.models.load_model(tmp_path / "model.keras"), tmp_path / "saved", required)
    np.testing.assert_allclose(served, model.predict({"encoder_input_tokens": required["encoder_input_tokens"][:2, :5]},
                                                     verbose=0), rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_built_exports_for_the_required_features(make_model, features, tmp_path):
    required = {name: features[name] for name in ("encoder_input_tokens", "decoder_input_tokens")}
    exported = SwitchTransformer(make_model(is_sparse=False, **SHALLOW).config)
    assert serve(exported, tmp_path / "saved", required).shape == (2, 5, 32)


def test_export_takes_a_signature(make_model, features, tmp_path):
    model = make_model(**ENCODER)
    model(features)
    required = {"encoder_input_tokens": features["encoder_input_tokens"]}
    signature = [{"encoder_input_tokens": keras.InputSpec(shape=(None, None), dtype="int32")}]
    assert serve(model, tmp_path / "saved", required, input_signature=signature).shape == (2, 5, 32)


def test_summary_and_count_params_need_no_call():
    model = SwitchTransformer(SwitchConfig(vocab_size=32, d_model=16, d_ff=24, d_kv=4, num_heads=3, num_experts=2,
                                           logits_via_embedding=False, scale_decoder_outputs=False, **SHALLOW))
    assert model.count_params() == model.config.num_parameters
    lines = []
    SwitchTransformer(model.config).summary(print_fn=lines.append, expand_nested=True)
    rows = [" ".join(line.replace("│", " ").replace("└", " ").split()) for line in "\n".join(lines).splitlines()]
    assert "?" not in "".join(rows)
    for layer, width in SHAPES.items():
        assert any(row.startswith(layer) and f"(None, None, {width})" in row for row in rows), layer


def test_from_preset_takes_fields_in_place_of_the_presets(tmp_path, monkeypatch):
    (tmp_path / "switch_tiny").mkdir()  # such as a run's: the preset counts
    monkeypatch.chdir(tmp_path)
    model = SwitchTransformer.from_preset("switch_tiny", num_experts=2, dtype="mixed_bfloat16")
    preset = SwitchConfig.from_preset("switch_tiny")
    assert model.config.num_experts == 2 and model.config.d_model == preset.d_model
    assert model.dtype_policy.name == "mixed_bfloat16"


@pytest.mark.parametrize("arguments, fields, message", [
    (("switch_tinny",), {}, "Did you mean 'switch_tiny'"), (("switch_tiny",), {"num_expert": 2}, "mean 'num_experts'"),
    ((".",), {}, r"use switch_tf.conversion.from_hugging_face\('.'\)"), ((3,), {}, "preset must be text")])
def test_from_preset_refuses(arguments, fields, message):
    with pytest.raises(ValueError, match=message):
        SwitchTransformer.from_preset(*arguments, **fields)


@pytest.mark.parametrize("inputs", [["a text"], "a text", np.array(["a text"]), tf.constant(["a text"]), [b"text"],
                                    np.array(["a text"], object)], ids=repr)
def test_generate_names_the_function_for_texts(make_model, inputs):
    with pytest.raises(ValueError, match=r"for texts use switch_tf.inference.generate\(model, texts, vocabulary\)"):
        make_model().generate(inputs)


def test_quantize_is_refused(make_model):
    with pytest.raises(ValueError, match="^SwitchTransformer cannot be quantized: its layers have no quantized form"):
        make_model().quantize("int8")


def test_a_fit_that_is_refused_leaves_a_model_that_fits(features):
    model = SwitchTransformer(SwitchConfig(vocab_size=32, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_experts=2,
                                           **ENCODER))
    targets = features["encoder_input_tokens"]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)  # no global generator: the refused trace is the first to ask for seeds
    model.compile("sgd", jit_compile=False)
    with pytest.raises(ValueError, match="compile was given no loss, so only the routers' losses would be trained"):
        model.fit(features, verbose=0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    with pytest.raises(ValueError, match="The loss needs targets, <int32>.batch, length., as y"):
        model.fit(features, verbose=0)
    loss = model.fit(features, targets, verbose=0).history["loss"]
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("names, message", [
    (("input_ids", "decoder_input_ids"), "needs the features 'encoder_input_tokens' and 'decoder_input_tokens'"),
    (("encoder_input_tokens", "decoder_input_token"), "needs the feature 'decoder_input_tokens' .* was given")])
def test_wrong_names_are_answered_with_the_right_ones(make_model, features, names, message):
    with pytest.raises(ValueError, match=message):
        make_model()(dict(zip(names, features.values(), strict=False)))


def test_copies_clones_and_what_comes_beside_the_features(make_model, features, tmp_path):
    model = make_model(**SHALLOW)
    model.generate(features["encoder_input_tokens"], max_length=2)
    expected = model(features)
    served = serve(model, tmp_path / "saved", features)  # without the program of `generate`
    np.testing.assert_allclose(
        served, model.predict({name: value[:2, :5] for name, value in features.items()}, verbose=0), rtol=1e-4,
        atol=1e-5)
    np.testing.assert_array_equal(copy.deepcopy(model)(features), expected)
    np.testing.assert_array_equal(model({**features, "id": np.arange(3), "text": None}), expected)
    assert keras.models.clone_model(model).config == model.config


@pytest.mark.slow
def test_a_saved_model_loads_where_nothing_but_the_package_was_imported(make_model, features, tmp_path):
    make_model(**SHALLOW).save(tmp_path / "model.keras")
    code = "import sys, switch_tf, keras; print(type(keras.models.load_model(sys.argv[1])).__name__)"
    loaded = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.keras")], capture_output=True, text=True,
                            check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert loaded.stdout.split()[-1] == "SwitchTransformer"
