"""T5X checkpoints, against logits that PyTorch computed of the same weights."""

import dataclasses
import json
import pathlib
import sys
import warnings

import numpy as np
import pytest

from switch_tf import SwitchConfig, SwitchTransformer, conversion
from switch_tf.cli import main
from switch_tf.conversion import checkpoint_files, formats, weight_source
from tests.conversion import from_bucket
from tests.conversion.t5x_checkpoints import arrays_from, write

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
CASES = ("t5_1_0", "t5_1_1", "switch", "switch_step_1")


def golden(case):
    """The configuration and T5X's arrays of a golden checkpoint of Hugging Face."""
    config = conversion.from_hugging_face(GOLDEN / case).config
    tensors = {name: tensor.read() for name, tensor in checkpoint_files.open_folder(GOLDEN / case).items()}
    return config, arrays_from(tensors, config.num_encoder_layers, config.num_decoder_layers,
                               config.logits_via_embedding)


def assert_same_logits(model, case, tolerance=1e-4):
    expected = np.load(GOLDEN / case / "expected.npz")
    is_real = expected["targets"] != 0
    logits = model({"encoder_input_tokens": expected["inputs"], "decoder_input_tokens": expected["decoder_inputs"]})
    assert np.abs(logits.numpy() - expected["logits"])[is_real].max() < tolerance


def refusal(folder, config):
    with pytest.raises(ValueError) as error:
        conversion.from_t5x(folder, config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_pytorchs(case, tmp_path):
    config, arrays = golden(case)
    # All weights are there: embedding, logits, two biases, two final norms, and those of the layers.
    assert sum(values.size for values in arrays.values()) == config.num_parameters
    folder = write(tmp_path / "checkpoint_7", arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = conversion.from_t5x(folder, config)
    assert model.config == config and {weight.dtype for weight in model.weights} == {"float32"}
    assert_same_logits(model, case)


@pytest.mark.parametrize("reference", ["spec", "old_spec", "placeholder"])
@pytest.mark.parametrize("inline", [0, 10**6])
def test_arrays_in_the_file_and_beside_it(reference, inline, tmp_path):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays, reference=reference, inline=inline)
    assert len(list(folder.iterdir())) == (1 if inline else 1 + len(arrays))
    assert_same_logits(conversion.from_t5x(folder, config), "t5_1_0")


def test_bfloat16_is_read_exactly(tmp_path):
    config, arrays = golden("switch")
    model = conversion.from_t5x(write(tmp_path / "in", arrays, dtype="bfloat16"), config)
    rounded = {name: values.astype("bfloat16").astype("float32") for name, values in arrays.items()}
    weights = weight_source.variables_of(model)
    np.testing.assert_array_equal(weights["token_embedder/embedding"], rounded["token_embedder/embedding"])
    np.testing.assert_array_equal(weights["encoder/layers_1/mlp/experts/wi"],
                                  rounded["encoder/layers_1/mlp/expert/wi/kernel"])
    np.testing.assert_array_equal(weights["encoder/encoder_norm/scale"], rounded["encoder/encoder_norm/scale"])
    assert not np.array_equal(rounded["token_embedder/embedding"], arrays["token_embedder/embedding"])


def test_a_weight_by_hand(tmp_path):
    config, arrays = golden("switch")
    # T5X's kernels are [in, out], heads before d_kv: head 2, d_kv 1 of 4 is column 2 * 4 + 1.
    arrays["encoder/layers_0/attention/query/kernel"][5, 9] = 29
    # Expert 3 of 4, input 7, output 11 of [expert, d_model, d_ff].
    arrays["encoder/layers_1/mlp/expert/wi/kernel"][3, 7, 11] = 31
    model = conversion.from_t5x(write(tmp_path / "in", arrays), config)
    assert model.encoder.layers[0].attention.query.numpy()[5, 2, 1] == 29
    assert model.encoder.layers[1].mlp.experts.input_kernels[0].numpy()[3, 7, 11] == 31


def test_gated_experts_logits_and_the_dense_layer_after_experts(tmp_path):
    # Switch-XXL and ST-MoE in small; Hugging Face has neither.
    config = SwitchConfig(vocab_size=24, d_model=8, d_ff=12, d_kv=3, num_heads=2, num_encoder_layers=2,
                          num_decoder_layers=1, decoder_sparse_step=1, num_experts=2, activation="geglu",
                          logits_via_embedding=False, extra_mlp=True, semantics="t5x")
    random = np.random.RandomState(0)
    attention = {"query/kernel": (8, 6), "key/kernel": (8, 6), "value/kernel": (8, 6), "out/kernel": (6, 8)}
    mlp, experts = ({f"{name}/kernel": (*first, *shape) for name, shape in (
        ("wi_0", (8, 12)), ("wi_1", (8, 12)), ("wo", (12, 8)))} for first in ((), (2,)))
    sparse = {**{f"mlp/expert/{name}": shape for name, shape in experts.items()},
              "mlp/router/router_weights/w/kernel": (8, 2), "pre_mlp_layer_norm/scale": (8,),
              "pre_extra_mlp_layer_norm/scale": (8,), **{f"extra_mlp/{name}": shape for name, shape in mlp.items()}}
    dense = {**{f"mlp/{name}": shape for name, shape in mlp.items()}, "pre_mlp_layer_norm/scale": (8,)}
    layers = {
        **{f"encoder/layers_{i}/attention/{name}": shape for i in (0, 1) for name, shape in attention.items()},
        **{f"encoder/layers_{i}/pre_attention_layer_norm/scale": (8,) for i in (0, 1)},
        **{f"encoder/layers_0/{name}": shape for name, shape in dense.items()},
        **{f"encoder/layers_1/{name}": shape for name, shape in sparse.items()},
        **{f"decoder/layers_0/{kind}_attention/{name}": shape for kind in ("self", "encoder_decoder")
           for name, shape in attention.items()},
        **{f"decoder/layers_0/pre_{kind}_attention_layer_norm/scale": (8,) for kind in ("self", "cross")},
        **{f"decoder/layers_0/{name}": shape for name, shape in sparse.items()}}
    shapes = {**layers, "token_embedder/embedding": (24, 8), "decoder/logits_dense/kernel": (8, 24),
              **{f"{stack}/relpos_bias/rel_embedding": (2, 32) for stack in ("encoder", "decoder")},
              **{f"{stack}/{stack}_norm/scale": (8,) for stack in ("encoder", "decoder")}}
    arrays = {name: random.randn(*shape).astype("float32") for name, shape in shapes.items()}
    weights = weight_source.variables_of(conversion.from_t5x(write(tmp_path / "in", arrays), config))
    assert len(weights) == len(arrays)
    for name, theirs in (("encoder/layers_1/mlp/experts/wi_0", "encoder/layers_1/mlp/expert/wi_0/kernel"),
                         ("encoder/layers_1/mlp/experts/wi_1", "encoder/layers_1/mlp/expert/wi_1/kernel"),
                         ("decoder/layers_0/mlp/router/kernel", "decoder/layers_0/mlp/router/router_weights/w/kernel"),
                         ("decoder/layers_0/extra_mlp/wo", "decoder/layers_0/extra_mlp/wo/kernel"),
                         ("encoder/layers_0/mlp/wi_1", "encoder/layers_0/mlp/wi_1/kernel"),
                         ("encoder/relpos_bias/rel_embedding", "encoder/relpos_bias/rel_embedding"),
                         ("logits_dense/kernel", "decoder/logits_dense/kernel")):
        np.testing.assert_array_equal(weights[name], arrays[theirs])


def test_the_command_takes_the_model_from_gin_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, arrays = golden("switch")
    write(tmp_path / "checkpoint_7", arrays)
    model = SwitchTransformer(config)
    model.build()
    conversion.to_switch_tf(model, tmp_path / "described")  # for its model.gin
    command = ["convert", "--json", "--input=checkpoint_7", "--gin_file=described/model.gin"]
    assert main.main([*command, "--output=ours"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["from"] == "t5x" and json.loads(told.out)["to"] == "switch_tf"
    assert_same_logits(conversion.from_switch_tf("ours"), "switch")
    assert main.main([*command, "--output=theirs", "--to=hugging_face"]) == 0
    assert_same_logits(conversion.from_hugging_face("theirs"), "switch")


def test_a_checkpoint_in_a_bucket_is_read_there_without_the_optimizers_state(bucket, tmp_path, monkeypatch):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays, inline=1000)  # beside the file is the embedding alone
    (folder / "state.param_states.a.v").mkdir()
    (folder / "state.param_states.a.v" / "0").write_bytes(bytes(10**6))
    num_bytes = from_bucket.convert(folder, bucket, monkeypatch, tmp_path / "ours", config)
    assert_same_logits(conversion.from_switch_tf(tmp_path / "ours"), "t5_1_0")
    # The file is searched once, and each array in it is read once more.
    assert num_bytes < 2 * (folder / "checkpoint").stat().st_size + 2 * arrays["token_embedder/embedding"].nbytes


def test_the_model_is_needed_and_presets_of_its_size_are_named(tmp_path):
    config = SwitchConfig.from_preset("t5_tiny")
    (embedding, *others) = ((config.vocab_size, 1), (config.num_parameters - config.vocab_size,))
    folder = write(tmp_path / "in", {"token_embedder/embedding": np.zeros(embedding), "rest": np.zeros(others[0])})
    assert refusal(folder, None) == (
        f"A T5X checkpoint does not describe its model, so {folder} of {config.num_parameters:,} parameters needs a "
        "configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python; gin/models/t5_tiny.gin has "
        "as many parameters.")


def test_a_model_file_for_a_folder_that_describes_its_model_is_refused(tmp_path, capsys):
    assert main.main(["convert", f"--input={GOLDEN / 't5_1_1'}", f"--output={tmp_path / 'x'}",
                      "--gin_file=gin/models/t5_small.gin"]) == 2
    assert "describes its model itself" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": 65}, "token_embedder/embedding' has shape (64, 16), but its configuration asks for (65, 16)"),
    ({"num_encoder_layers": 3}, "lacks 'target/encoder/layers_2/"),
    ({"num_decoder_layers": 2}, "holds 'target/decoder/layers_2/"),
    ({"activation": "geglu"}, "holds 'target/encoder/layers_0/mlp/wi/kernel', for which a model of this configuration"),
    ({"num_heads": 6, "d_kv": 2}, "rel_embedding' has shape (3, 8), but its configuration asks for (6, 8)"),
    ({"logits_via_embedding": False}, "lacks 'target/decoder/logits_dense/kernel' of shape (16, 64)"),
    ({"num_experts": 4, "expert_dropout_rate": 0.1}, "holds 'target/encoder/layers_1/mlp/wi/kernel', for which")])
def test_another_model_is_refused_before_a_value_is_read(changes, message, tmp_path, monkeypatch):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays)
    monkeypatch.setattr(checkpoint_files.Tensor, "read", lambda self: pytest.fail("read a value"))
    assert message in refusal(folder, dataclasses.replace(config, **changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_experts": 8}, "has shape (16, 4), but its configuration asks for (16, 8)"),
    ({"encoder_sparse_step": 1}, "lacks 'target/encoder/layers_0/mlp/"),
    ({"num_experts": 0, "semantics": "switch_tf", "expert_capacity": None, "expert_dropout_rate": 0.0},
     "for which a model of this configuration has no place")])
def test_other_experts_are_refused(changes, message, tmp_path):
    config, arrays = golden("switch")
    if changes.get("encoder_sparse_step"):
        changes = {"encoder_sparse_indices": (0, 1, 2, 3)}
    text = refusal(write(tmp_path / "in", arrays), dataclasses.replace(config, **changes))
    assert message in text or "holds 'target/encoder/layers_0/mlp/" in text


def test_a_missing_and_a_surplus_array(tmp_path):
    config, arrays = golden("t5_1_0")
    norm = arrays.pop("encoder/layers_1/pre_mlp_layer_norm/scale")
    assert refusal(write(tmp_path / "a", arrays), config) == (
        "The checkpoint lacks 'target/encoder/layers_1/pre_mlp_layer_norm/scale' of shape (16,), which holds the "
        "weight 'encoder/layers_1/pre_mlp_layer_norm/scale'; give the --gin_file of its model, or download it again if "
        "it is incomplete.")
    arrays |= {"encoder/layers_1/pre_mlp_layer_norm/scale": norm, "encoder/layers_1/mlp/wi/bias": norm}
    assert refusal(write(tmp_path / "b", arrays), config) == (
        "No rule knows the checkpoint's tensor 'target/encoder/layers_1/mlp/wi/bias'; exactly one must, so that "
        "nothing is lost or taken twice.")


def zarr(folder, name="target.encoder.layers_0.mlp.wi.kernel"):
    return folder / name


def test_truncated_and_missing_chunks(tmp_path):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays)
    chunk = zarr(folder) / "0.1"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-60])
    message = refusal(folder, config)
    assert message.startswith("'target/encoder/layers_0/mlp/wi/kernel' cannot be read (")
    assert "Not enough data" in message
    assert message.endswith(f"; download {zarr(folder)} again.")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    chunk.write_bytes(flipped)
    assert "cannot be read" in refusal(folder, config)
    chunk.unlink()  # which tensorstore by itself reads as zeros
    assert "is missing" in refusal(folder, config)


def test_missing_and_damaged_descriptions_of_arrays(tmp_path):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays)
    description = zarr(folder) / ".zarray"
    content = json.loads(description.read_text())
    for changes, message in (({"shape": "none"}, "cannot be read"), ({"chunks": [10**6, 10**6]}, "in chunks of"),
                             ({"dtype": "<i4"}, "must be float32, bfloat16 or float16, but")):
        description.write_text(json.dumps({**content, **changes}))
        assert message in refusal(folder, config)
    description.unlink()
    assert f"The checkpoint lacks {description}" in refusal(folder, config)
    zarr(folder).rename(tmp_path / "elsewhere")
    zarr(folder).symlink_to(tmp_path / "elsewhere")
    description.write_text(json.dumps(content))
    assert "must be a regular file" in refusal(folder, config)


def test_values_that_are_not_finite(tmp_path):
    config, arrays = golden("t5_1_0")
    arrays["encoder/layers_0/mlp/wi/kernel"][0, 0] = np.inf
    assert "'target/encoder/layers_0/mlp/wi/kernel' in" in refusal(write(tmp_path / "in", arrays), config)


def test_without_the_extra_one_sentence_names_it(tmp_path, monkeypatch):
    config, arrays = golden("t5_1_0")
    folder = write(tmp_path / "in", arrays)
    monkeypatch.setitem(sys.modules, "msgpack", None)
    assert "A T5X checkpoint is read with msgpack" in refusal(folder, config)
    assert "pip install 'switch-tf[t5x]'" in refusal(folder, config)
    assert formats.find(folder) is formats.T5X  # recognised without them


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "x"')
    assert "must be a T5X checkpoint, a folder such as checkpoint_1000000" in refusal(tmp_path, SwitchConfig())
    assert "must be a T5X checkpoint" in refusal(tmp_path / "nowhere", SwitchConfig())
