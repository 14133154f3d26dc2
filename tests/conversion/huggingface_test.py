"""Reading and writing folders. That the numbers are Hugging Face's is tested in tests/parity/hugging_face_test.py."""

import dataclasses
import functools
import json
from unittest import mock

import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.conversion import checkpoint_files
from tests.conversion.shared import GOLDEN, built, copy, golden, refusal, tensors_of

FEATURES = {"encoder_input_tokens": np.array([[3, 4, 5, 6, 0]]), "decoder_input_tokens": np.array([[0, 7, 8]])}


NORM = "encoder.block.1.layer.1.layer_norm.weight"
SPARSE = {"num_experts": 2, "semantics": "hf", "expert_capacity": 3, "expert_dropout_rate": 0.1}
TINY = {"vocab_size": 16, "d_model": 8, "d_ff": 12, "d_kv": 3, "num_heads": 2, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}


def tiny_model(**changes):
    return built(SwitchConfig(**TINY | changes))


reading_refusal = functools.partial(refusal, conversion.from_hugging_face)
writing_refusal = functools.partial(refusal, conversion.to_hugging_face)


@pytest.fixture
def there_and_back(tmp_path):
    """A function that writes a model into the folder `out`; returns what was written, and what is read from there."""
    def there_and_back(model, **options):
        conversion.to_hugging_face(model, tmp_path / "out", **options)
        return checkpoint_files.open_folder(tmp_path / "out"), conversion.from_hugging_face(tmp_path / "out")

    return there_and_back


def test_a_weight_by_hand(there_and_back):
    # Their kernels are [out, in], heads before d_kv in "out"; our query kernel is [in, heads, d_kv].
    model = tiny_model()
    query = np.arange(48, dtype="float32").reshape(8, 2, 3)
    model.encoder.layers[1].attention.query.assign(query)
    theirs = there_and_back(model)[0]["encoder.block.1.layer.0.SelfAttention.q.weight"].read()
    assert theirs.shape == (6, 8)
    # Head 1, d_kv 2 is row 1 * 3 + 2; input 4: 4 * 6 + 1 * 3 + 2 = 29.
    assert theirs[5, 4] == query[4, 1, 2] == 29


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("sparse", [{}, SPARSE], ids=["dense", "sparse"])
def test_every_form_of_logits_there_and_back(is_tied, is_scaled, sparse, there_and_back):
    model = tiny_model(logits_via_embedding=is_tied, scale_decoder_outputs=is_scaled, **sparse)
    written, again = there_and_back(model)
    assert ("lm_head.weight" in written) == (not is_tied or not is_scaled)
    assert ("encoder.embed_tokens.weight" in written) == (not is_scaled and bool(sparse))
    assert again.config == model.config
    np.testing.assert_array_equal(again(FEATURES), model(FEATURES))


def test_our_own_switch_transformer_leaves_with_a_capacity(there_and_back, tmp_path):
    model = tiny_model(num_experts=2, eval_capacity_factor=2.0, expert_dropout_rate=0.1)
    assert "a fixed number of slots" in writing_refusal(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    # Five slots for each sequence of five tokens drop nothing, like a factor of two for two experts. Padding is routed
    # there and not here, but takes no slot from a real token.
    _, again = there_and_back(model, expert_capacity=5)
    assert (again.config.semantics, again.config.expert_capacity) == ("hf", 5)
    np.testing.assert_allclose(again(FEATURES), model(FEATURES), atol=1e-5)


def test_gated_experts_and_logits_of_t5x_are_read_in_half_precision(tmp_path):
    # switch-xxl-128 in small: made here from a plain checkpoint, its wi taken for both of the gated layer's.
    tensors = {}
    for name, tensor in tensors_of("switch").items():
        for gated in ("wi_0", "wi_1") if ".wi." in name else ("wi",):
            tensors[name.replace(".wi.", f".{gated}.")] = tensor.astype("float16")
    tensors["decoder.logits_dense.weight"] = 2 * tensors["shared.weight"]
    with pytest.warns(UserWarning):
        model = conversion.from_hugging_face(copy("switch", tmp_path / "in", tensors))
    assert (model.config.activation, model.config.scales_logits) == ("geglu", False)
    assert {weight.dtype for weight in model.weights} == {"float32"}
    np.testing.assert_array_equal(model.logits_dense.kernel.numpy(), 2 * tensors["shared.weight"].T)
    np.testing.assert_array_equal(model.encoder.layers[3].mlp.experts.input_kernels[1].numpy()[2],
                                  tensors["encoder.block.3.layer.1.mlp.experts.expert_2.wi_1.weight"].T)


def test_wrong_numbers_of_layers_are_put_right(tmp_path):
    folder = copy("switch_step_1", tmp_path / "in", num_decoder_layers=1, decoder_sparse_step=0)
    with pytest.warns(UserWarning):
        model = conversion.from_hugging_face(folder)
    assert model.config == golden("switch_step_1")[0]


def test_a_bias_that_old_files_have_is_ignored(tmp_path):
    tensors = tensors_of("t5_1_1")
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((8, 3), "float32")
    model = conversion.from_hugging_face(copy("t5_1_1", tmp_path / "in", tensors))
    assert model.config == golden("t5_1_1")[0]


@pytest.mark.parametrize(("case", "change", "values", "message"), [
    ("t5_1_1", lambda tensors: tensors.pop(NORM), {}, f"lacks '{NORM}' of shape (16,), which holds the weight "
     "'encoder/layers_1/pre_mlp_layer_norm/scale'"),
    ("t5_1_1", lambda tensors: tensors.update({NORM: tensors[NORM][1:]}), {},
     f"'{NORM}' has shape (15,), but its configuration asks for (16,)"),
    ("t5_1_1", lambda tensors: tensors.update({"classifier.weight": tensors[NORM]}), {},
     "No rule knows the checkpoint's tensor 'classifier.weight'"),
    ("t5_1_1", lambda tensors: [tensors.pop(name) for name in ("shared.weight", "lm_head.weight")], {},
     "lacks 'shared.weight' of shape (64, 16)"),
    ("t5_1_1", lambda tensors: tensors.update({"decoder.embed_tokens.weight": tensors["shared.weight"] + 1}), {},
     "'decoder.embed_tokens.weight' and 'shared.weight' differ, but encoder and decoder share one"),
    ("t5_1_1", lambda tensors: tensors.update({"encoder.embed_tokens.weight": tensors["shared.weight"][1:]}), {},
     "'encoder.embed_tokens.weight' and 'shared.weight' differ"),
    ("switch", dict, {"vocab_size": 65}, "'shared.weight' has shape (64, 16), but its configuration asks for (65, 16)"),
    ("switch", dict, {"num_experts": 3},
     "expert_3.wi.weight', for which a model of this configuration has no place"),
    ("switch", dict, {"num_experts": 5},
     "classifier.weight' has shape (4, 16), but its configuration asks for (5, 16)"),
    # transformers ties nothing there, so lm_head alone is no embedding.
    ("switch", lambda tensors: tensors.update({"lm_head.weight": tensors.pop("shared.weight")}),
     {"tie_word_embeddings": False}, "lacks 'shared.weight'"),
    ("umt5", dict, {"model_type": "t5"}, "No rule knows the checkpoint's tensor 'decoder.block.1.layer.0.SelfAttention."
     "relative_attention_bias.weight'")])
def test_damaged_checkpoints_and_other_configurations_are_refused(case, change, values, message, tmp_path):
    tensors = tensors_of(case)
    change(tensors)
    assert message in reading_refusal(copy(case, tmp_path / "in", tensors, **values))


def test_weights_that_are_not_finite_are_refused_by_their_name(tmp_path):
    tensors, name = tensors_of("t5_1_0"), "encoder.block.0.layer.0.SelfAttention.q.weight"
    tensors[name] = np.where(np.eye(*tensors[name].shape), np.float32("nan"), tensors[name])
    folder = copy("t5_1_0", tmp_path / "nan", tensors)
    assert reading_refusal(folder) == (
        f"{name!r} in {folder} is not finite, and so would be all that the model computes; read a "
        "checkpoint from before its training went wrong.")


EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("case, number", [
    *(("t5_1_0", number) for number in range(1, 16)), ("switch", 1), ("switch", 2), ("switch", 8), ("switch", 12),
    *(("t5_1_1", number) for number in range(1, 8))])
def test_the_embedding_under_any_of_its_names(case, number, tmp_path):
    """A gated model may also have logits of its own, as t5_1_1 does."""
    tensors = tensors_of(case)
    is_tied, embedding, logits = case != "t5_1_1", tensors["shared.weight"], tensors.get("lm_head.weight")
    names = EMBEDDINGS if is_tied else EMBEDDINGS[:3]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    tensors |= {name: embedding.copy() for place, name in enumerate(names) if number >> place & 1}
    model = conversion.from_hugging_face(copy(case, tmp_path / "in", tensors))
    np.testing.assert_array_equal(model.token_embedder.embedding, embedding)
    assert model.config.logits_via_embedding == is_tied
    if not is_tied:
        np.testing.assert_array_equal(model.logits_dense.kernel, logits.T)


def test_logits_of_a_tied_model_that_differ_are_their_own(tmp_path):
    # transformers 5.23 then ties nothing, and scales as config.json says.
    tensors = tensors_of("switch")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    config = conversion.from_hugging_face(copy("switch", tmp_path / "in", tensors)).config
    assert (config.logits_via_embedding, config.scales_logits) == (False, True)


def test_what_is_no_folder_of_a_model(tmp_path):
    for folder in (tmp_path, "google/switch-base-8"):
        message = reading_refusal(folder)
        assert message.startswith(f"{str(folder)!r} must be a folder with config.json")
        assert "hf download NAME --local-dir FOLDER" in message


def test_nothing_is_overwritten(tmp_path):
    model = tiny_model()
    (tmp_path / "mine").touch()
    for folder in (tmp_path, tmp_path / "mine"):
        assert "must be new or an empty folder, so that nothing is overwritten" in writing_refusal(model, folder)
    (tmp_path / "empty").mkdir()
    conversion.to_hugging_face(model, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("changes", [
    {"activation": "geglu_exact"}, {"activation": "swiglu", "scale_decoder_outputs": False}, SPARSE,
    SPARSE | {"scale_decoder_outputs": False}])
def test_encoders_there_and_back(changes, there_and_back, tmp_path):
    model = tiny_model(num_decoder_layers=0, **changes)
    written, again = there_and_back(model)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"][0] in ("T5EncoderModel", "SwitchTransformersEncoderModel")
    assert (values["is_encoder_decoder"], values["num_decoder_layers"]) == (False, 0)
    assert not any(name.startswith(("decoder", "lm_head")) for name in written)
    assert again.config == dataclasses.replace(model.config, scale_decoder_outputs=model.config.scales_logits)
    hidden = again.encode(FEATURES).numpy()
    assert hidden.shape == (1, 5, 8)
    np.testing.assert_array_equal(hidden, model.encode(FEATURES))
    # The logits are computed from what encode returns.
    scale = 8**-0.5 if model.config.scales_logits else 1.0
    np.testing.assert_allclose(scale * hidden @ model.token_embedder.embedding.numpy().T, model(FEATURES), atol=1e-5)


def test_a_refused_model_and_an_interrupted_writing_leave_nothing(tmp_path):
    writing_refusal(tiny_model(num_decoder_layers=0, logits_via_embedding=False), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with (mock.patch.object(checkpoint_files.Shards, "append", side_effect=KeyboardInterrupt),
          pytest.raises(KeyboardInterrupt)):
        conversion.to_hugging_face(tiny_model(), tmp_path / "parent" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["parent"]


def test_a_bias_for_each_layer_makes_a_umt5(there_and_back, tmp_path):
    model = tiny_model(relative_attention_per_layer=True, scale_decoder_outputs=True)
    bias = np.arange(16, dtype="float32").reshape(2, 8)
    model.decoder.layers[1].relpos_bias.rel_embedding.assign(bias)
    with pytest.warns(UserWarning, match="UMT5 was trained with 300 gaps"):
        written, again = there_and_back(model)
    # Theirs is [buckets, heads]: bucket 3 of head 1 is 1 * 8 + 3 = 11.
    assert written["decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"].read()[3, 1] == 11
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "umt5"
    assert again.config == model.config
    np.testing.assert_array_equal(again(FEATURES), model(FEATURES))


@pytest.mark.filterwarnings("ignore:UMT5 was trained")
def test_a_umt5_whose_configuration_unties_the_logits_does_not_scale(tmp_path):
    # As in T5X and transformers 4; transformers 5 scales every UMT5.
    untied, model = map(conversion.from_hugging_face, (
        copy("umt5", tmp_path / "in", tie_word_embeddings=False), GOLDEN / "umt5"))
    assert (untied.config.scales_logits, model.config.scales_logits) == (False, True)
    np.testing.assert_allclose(untied(FEATURES), 4 * model(FEATURES), rtol=1e-5)  # sqrt(16)
    assert "UMT5, in transformers 5, always scales the last hidden state" in writing_refusal(untied, tmp_path / "out")


def test_a_bias_for_each_layer_and_experts_are_refused(tmp_path):
    model = tiny_model(relative_attention_per_layer=True, num_experts=2, eval_capacity_factor=2.0)
    assert "each layer has its own (relative_attention_per_layer=True)" in writing_refusal(
        model, tmp_path / "out", expert_capacity=5)
