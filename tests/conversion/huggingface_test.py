"""Reading and writing folders. That the numbers are Hugging Face's is tested in tests/parity/hugging_face_test.py."""

import dataclasses
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

from switch_tf import conversion
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import checkpoint_files
from switch_tf.models.switch_transformer import SwitchTransformer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
FEATURES = {"encoder_input_tokens": np.array([[3, 4, 5, 6, 0]]), "decoder_input_tokens": np.array([[0, 7, 8]])}


def tiny_model(**changes):
    config = SwitchConfig(vocab_size=16, d_model=8, d_ff=12, d_kv=3, num_heads=2, num_encoder_layers=2,
                          num_decoder_layers=2, relative_attention_num_buckets=8, relative_attention_max_distance=12)
    model = SwitchTransformer(dataclasses.replace(config, **changes))
    model.build()
    return model


def copy(case, folder, tensors=None, **values):
    """A copy of a golden checkpoint with other values in config.json, or other tensors."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    if tensors is None:
        shutil.copy(GOLDEN / case / "model.safetensors", folder)
    else:
        safetensors.numpy.save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
                                    folder / "model.safetensors")
    return folder


def golden_tensors(case):
    return {name: tensor.read() for name, tensor in checkpoint_files.open_folder(GOLDEN / case).items()}


def reading_refusal(folder):
    with pytest.raises(ValueError) as error:
        conversion.from_hugging_face(folder)
    return str(error.value)


def writing_refusal(model, folder, **options):
    with pytest.raises(ValueError) as error:
        conversion.to_hugging_face(model, folder, **options)
    return str(error.value)


def test_a_weight_by_hand(tmp_path):
    # Their kernels are [out, in], heads before d_kv in "out"; our query kernel is [in, heads, d_kv].
    model = tiny_model()
    query = np.arange(48, dtype="float32").reshape(8, 2, 3)
    model.encoder.layers[1].attention.query.assign(query)
    conversion.to_hugging_face(model, tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    theirs = written["encoder.block.1.layer.0.SelfAttention.q.weight"]
    assert theirs.shape == (6, 8)
    # Head 1, d_kv 2 is row 1 * 3 + 2; input 4: 4 * 6 + 1 * 3 + 2 = 29.
    assert theirs[5, 4] == query[4, 1, 2] == 29


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("num_experts", [0, 2])
def test_every_form_of_logits_there_and_back(is_tied, is_scaled, num_experts, tmp_path):
    sparse = {"semantics": "hf", "expert_capacity": 1, "expert_dropout_rate": 0.1} if num_experts else {}
    model = tiny_model(logits_via_embedding=is_tied, scale_decoder_outputs=is_scaled, num_experts=num_experts, **sparse)
    conversion.to_hugging_face(model, tmp_path / "out")
    written = checkpoint_files.open_folder(tmp_path / "out")
    assert ("lm_head.weight" in written) == (not is_tied or not is_scaled)
    assert ("encoder.embed_tokens.weight" in written) == (not is_scaled and num_experts > 0)
    again = conversion.from_hugging_face(tmp_path / "out")
    assert again.config == model.config
    np.testing.assert_array_equal(again(FEATURES).numpy(), model(FEATURES).numpy())


def test_our_own_switch_transformer_leaves_with_a_capacity(tmp_path):
    model = tiny_model(num_experts=2, eval_capacity_factor=2.0, expert_dropout_rate=0.1)
    assert "a fixed number of slots" in writing_refusal(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    # Five slots for each sequence of five tokens drop nothing, like a factor of two for two experts. Padding is routed
    # there and not here, but takes no slot from a real token.
    conversion.to_hugging_face(model, tmp_path / "out", expert_capacity=5)
    again = conversion.from_hugging_face(tmp_path / "out")
    assert (again.config.semantics, again.config.expert_capacity) == ("hf", 5)
    np.testing.assert_allclose(again(FEATURES).numpy(), model(FEATURES).numpy(), atol=1e-5)


def test_half_precision_checkpoints(tmp_path):
    tensors = golden_tensors("switch")
    folder = copy("switch", tmp_path / "in", {name: tensor.astype("float16") for name, tensor in tensors.items()})
    model = conversion.from_hugging_face(folder)
    assert {weight.dtype for weight in model.weights} == {"float32"}
    np.testing.assert_array_equal(model.token_embedder.embedding.numpy(), tensors["shared.weight"].astype("float16"))


def test_gated_experts_and_logits_of_t5x_are_read(tmp_path):
    # switch-xxl-128 in small: made here from a plain checkpoint, its wi taken for both of the gated layer's.
    tensors = {}
    for name, tensor in golden_tensors("switch").items():
        for gated in ("wi_0", "wi_1") if ".wi." in name else ("wi",):
            tensors[name.replace(".wi.", f".{gated}.")] = tensor
    tensors["decoder.logits_dense.weight"] = 2 * tensors["shared.weight"]
    with pytest.warns(UserWarning):
        model = conversion.from_hugging_face(copy("switch", tmp_path / "in", tensors))
    assert (model.config.activation, model.config.scales_logits) == ("geglu", False)
    np.testing.assert_array_equal(model.logits_dense.kernel.numpy(), 2 * tensors["shared.weight"].T)
    np.testing.assert_array_equal(model.encoder.layers[3].mlp.experts.input_kernels[1].numpy()[2],
                                  tensors["encoder.block.3.layer.1.mlp.experts.expert_2.wi_1.weight"].T)


def test_wrong_numbers_of_layers_are_put_right(tmp_path):
    folder = copy("switch_step_1", tmp_path / "in", num_decoder_layers=1, decoder_sparse_step=0)
    with pytest.warns(UserWarning):
        model = conversion.from_hugging_face(folder)
    assert model.config == conversion.from_hugging_face(GOLDEN / "switch_step_1").config


def test_a_bias_that_old_files_have_is_ignored(tmp_path):
    tensors = golden_tensors("t5_1_1")
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((8, 3), "float32")
    model = conversion.from_hugging_face(copy("t5_1_1", tmp_path / "in", tensors))
    assert model.config == conversion.from_hugging_face(GOLDEN / "t5_1_1").config


def test_damaged_checkpoints(tmp_path):
    tensors = golden_tensors("t5_1_1")
    norm = tensors.pop("encoder.block.1.layer.1.layer_norm.weight")
    folder = copy("t5_1_1", tmp_path / "in", tensors)
    assert "lacks 'encoder.block.1.layer.1.layer_norm.weight' of shape (16,), which holds the weight " \
        "'encoder/layers_1/pre_mlp_layer_norm/scale'" in reading_refusal(folder)
    copy("t5_1_1", folder, {**tensors, "encoder.block.1.layer.1.layer_norm.weight": norm[1:]})
    assert "'encoder.block.1.layer.1.layer_norm.weight' has shape (15,), but its configuration asks for (16,)" in (
        reading_refusal(folder))
    copy("t5_1_1", folder, {**tensors, "encoder.block.1.layer.1.layer_norm.weight": norm, "classifier.weight": norm})
    assert "No rule knows the checkpoint's tensor 'classifier.weight'" in reading_refusal(folder)
    del tensors["shared.weight"], tensors["lm_head.weight"]
    copy("t5_1_1", folder, {**tensors, "encoder.block.1.layer.1.layer_norm.weight": norm})
    assert "lacks 'shared.weight' of shape (64, 16)" in reading_refusal(folder)


def test_weights_that_are_not_finite_are_refused_by_their_name(tmp_path):
    tensors = {name: tensor.copy() for name, tensor in golden_tensors("t5_1_0").items()}
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    tensors[name][0, 1] = np.nan
    folder = copy("t5_1_0", tmp_path / "nan", tensors)
    assert reading_refusal(folder) == (
        f"{name!r} in {folder} is not finite, and so would be all that the model computes; read a "
        "checkpoint from before its training went wrong.")


def test_a_configuration_of_another_size(tmp_path):
    assert "'shared.weight' has shape (64, 16), but its configuration asks for (65, 16)" in reading_refusal(
        copy("switch", tmp_path / "in", vocab_size=65))
    assert "expert_3.wi.weight', for which a model of this configuration has no place" in reading_refusal(
        copy("switch", tmp_path / "in", num_experts=3))
    assert "classifier.weight' has shape (4, 16), but its configuration asks for (5, 16)" in reading_refusal(
        copy("switch", tmp_path / "in", num_experts=5))


def test_a_second_embedding_is_refused(tmp_path):
    tensors = golden_tensors("t5_1_1")
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    message = reading_refusal(copy("t5_1_1", tmp_path / "in", tensors))
    assert "'decoder.embed_tokens.weight' and 'shared.weight' differ, but encoder and decoder share one" in message


EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("case, number", [
    ("t5_1_0", number) for number in range(1, 16)] + [("switch", 1), ("switch", 2), ("switch", 8), ("switch", 12)])
def test_the_embedding_under_any_of_its_tied_names(case, number, tmp_path):
    tensors = golden_tensors(case)
    embedding = tensors["shared.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in EMBEDDINGS}
    tensors |= {name: embedding.copy() for place, name in enumerate(EMBEDDINGS) if number >> place & 1}
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / case, folder)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    model = conversion.from_hugging_face(folder)
    assert model.config.logits_via_embedding
    np.testing.assert_array_equal(model.token_embedder.embedding, embedding)


@pytest.mark.parametrize("number", range(1, 8))
def test_logits_of_their_own_beside_any_name_of_the_embedding(number, tmp_path):
    tensors = golden_tensors("t5_1_1")
    embedding, logits = tensors.pop("shared.weight"), tensors["lm_head.weight"]
    tensors |= {name: embedding.copy() for place, name in enumerate(EMBEDDINGS[:3]) if number >> place & 1}
    model = conversion.from_hugging_face(copy("t5_1_1", tmp_path / "in", tensors))
    np.testing.assert_array_equal(model.token_embedder.embedding, embedding)
    np.testing.assert_array_equal(model.logits_dense.kernel, logits.T)


def test_logits_of_a_tied_model_that_differ_are_their_own(tmp_path):
    # transformers 5.23 then ties nothing, and scales as config.json says.
    tensors = golden_tensors("switch")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    config = conversion.from_hugging_face(copy("switch", tmp_path / "in", tensors)).config
    assert (config.logits_via_embedding, config.scales_logits) == (False, True)


def test_embeddings_of_different_shapes_are_refused(tmp_path):
    tensors = golden_tensors("t5_1_1")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"][1:]
    message = reading_refusal(copy("t5_1_1", tmp_path / "in", tensors))
    assert "'encoder.embed_tokens.weight' and 'shared.weight' differ" in message


def test_untied_switch_transformers_need_their_embedding(tmp_path):
    # transformers ties nothing there, so lm_head alone is no embedding.
    tensors = golden_tensors("switch")
    tensors["lm_head.weight"] = tensors.pop("shared.weight")
    assert "lacks 'shared.weight'" in reading_refusal(
        copy("switch", tmp_path / "in", tensors, tie_word_embeddings=False))


def test_what_is_no_folder_of_a_model(tmp_path):
    for folder in (tmp_path, "google/switch-base-8"):
        message = reading_refusal(folder)
        assert message.startswith(f"{str(folder)!r} must be a folder with config.json")
        assert "hf download NAME --local-dir FOLDER" in message


def test_nothing_is_overwritten(tmp_path):
    model = tiny_model()
    (tmp_path / "mine").touch()
    assert "must be new or an empty folder, so that nothing is overwritten" in writing_refusal(model, tmp_path)
    assert "must be new or an empty folder" in writing_refusal(model, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    conversion.to_hugging_face(model, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("changes", [
    {"activation": "geglu_exact"}, {"activation": "swiglu", "scale_decoder_outputs": False},
    {"num_experts": 2, "semantics": "hf", "expert_capacity": 3, "expert_dropout_rate": 0.1},
    {"num_experts": 2, "semantics": "hf", "expert_capacity": 3, "expert_dropout_rate": 0.1,
     "scale_decoder_outputs": False}])
def test_encoders_there_and_back(changes, tmp_path):
    model = tiny_model(num_decoder_layers=0, **changes)
    conversion.to_hugging_face(model, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"][0] in ("T5EncoderModel", "SwitchTransformersEncoderModel")
    assert (values["is_encoder_decoder"], values["num_decoder_layers"]) == (False, 0)
    written = checkpoint_files.open_folder(tmp_path / "out")
    assert not any(name.startswith(("decoder", "lm_head")) for name in written)
    again = conversion.from_hugging_face(tmp_path / "out")
    assert again.config == dataclasses.replace(model.config, scale_decoder_outputs=model.config.scales_logits)
    hidden = again.encode(FEATURES).numpy()
    assert hidden.shape == (1, 5, 8)
    np.testing.assert_array_equal(hidden, model.encode(FEATURES).numpy())
    # The logits are computed from what encode returns.
    scale = 8**-0.5 if model.config.scales_logits else 1.0
    np.testing.assert_allclose(scale * hidden @ model.token_embedder.embedding.numpy().T, model(FEATURES), atol=1e-5)


def test_a_refused_model_writes_nothing(tmp_path):
    writing_refusal(tiny_model(num_decoder_layers=0, logits_via_embedding=False), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_writing_leaves_nothing(tmp_path):
    with (mock.patch.object(checkpoint_files.Shards, "append", side_effect=KeyboardInterrupt),
          pytest.raises(KeyboardInterrupt)):
        conversion.to_hugging_face(tiny_model(), tmp_path / "parent" / "out")
    assert not list((tmp_path / "parent").iterdir())


def test_a_bias_for_each_layer_makes_a_umt5(tmp_path):
    model = tiny_model(relative_attention_per_layer=True, scale_decoder_outputs=True)
    bias = np.arange(16, dtype="float32").reshape(2, 8)
    model.decoder.layers[1].relpos_bias.rel_embedding.assign(bias)
    conversion.to_hugging_face(model, tmp_path / "out")
    written = checkpoint_files.open_folder(tmp_path / "out")
    # Theirs is [buckets, heads]: bucket 3 of head 1 is 1 * 8 + 3 = 11.
    assert written["decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"].read()[3, 1] == 11
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "umt5"
    with pytest.warns(UserWarning, match="UMT5 was trained with 300 gaps"):
        again = conversion.from_hugging_face(tmp_path / "out")
    assert again.config == model.config
    np.testing.assert_array_equal(again(FEATURES).numpy(), model(FEATURES).numpy())


@pytest.mark.filterwarnings("ignore:UMT5 was trained")
def test_a_umt5_whose_configuration_unties_the_logits_does_not_scale(tmp_path):
    # As in T5X and transformers 4; transformers 5 scales every UMT5.
    shutil.copytree(GOLDEN / "umt5", tmp_path / "in")
    copy("umt5", tmp_path / "in", tie_word_embeddings=False)
    untied, model = conversion.from_hugging_face(tmp_path / "in"), conversion.from_hugging_face(GOLDEN / "umt5")
    assert (untied.config.scales_logits, model.config.scales_logits) == (False, True)
    np.testing.assert_allclose(untied(FEATURES).numpy(), 4 * model(FEATURES).numpy(), rtol=1e-5)  # sqrt(16)
    assert "UMT5, in transformers 5, always scales the last hidden state" in writing_refusal(untied, tmp_path / "out")


def test_a_bias_for_each_layer_of_another_model_type(tmp_path):
    assert reading_refusal(copy("umt5", tmp_path / "in", model_type="t5")).startswith(
        "No rule knows the checkpoint's tensor 'decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight'")
    model = tiny_model(relative_attention_per_layer=True, num_experts=2, eval_capacity_factor=2.0)
    assert "each layer has its own (relative_attention_per_layer=True)" in writing_refusal(
        model, tmp_path / "out", expert_capacity=5)
