"""Scanned layers of T5X checkpoints. Every layer has the stack's position bias, so that the logits stay PyTorch's."""

import dataclasses

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import checkpoint_files, formats, t5x, t5x_file
from switch_tf.conversion.weight_source import variables_of
from tests.conversion.t5x_checkpoints import scanned, with_layer_biases, write
from tests.conversion.t5x_test import assert_same_logits, golden, refusal

SUBBLOCKS = {"t5_1_0": None, "t5_1_1": None, "switch": {"encoder": 2, "decoder": 2},
             "switch_step_1": {"encoder": 1, "decoder": 1}}


def layered(case):
    """The configuration, arrays of single layers with biases of their own, and depths."""
    config, arrays = golden(case)
    num_layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    return dataclasses.replace(config, relative_attention_per_layer=True), with_layer_biases(
        arrays, num_layers), num_layers


@pytest.mark.parametrize("case", SUBBLOCKS)
def test_logits_are_pytorchs(case, tmp_path):
    config, arrays, num_layers = layered(case)
    arrays = scanned(arrays, num_layers, SUBBLOCKS[case])
    assert not [name for name in arrays if "layers_" in name]
    assert sum(values.size for values in arrays.values()) == config.num_parameters
    assert_same_logits(conversion.from_t5x(write(tmp_path / "in", arrays), config), case)


def test_scanned_and_single_layers_have_the_same_bits(tmp_path):
    config, arrays, num_layers = layered("switch")
    arrays = {name: np.random.RandomState(len(name)).randn(*values.shape) for name, values in arrays.items()}
    single = conversion.from_t5x(write(tmp_path / "single", arrays), config)
    model = conversion.from_t5x(write(
        tmp_path / "scanned", scanned(arrays, num_layers, SUBBLOCKS["switch"]), dtype="float32"), config)
    for ours, theirs in zip(model.weights, single.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=ours.path)


def test_axes_by_hand(tmp_path):
    config, arrays, num_layers = layered("switch")
    arrays = scanned(arrays, num_layers, SUBBLOCKS["switch"])
    experts = arrays["encoder/encoder/subblock_1/mlp/expert/wi/kernel"]
    assert experts.shape == (4, 2, 16, 24)  # experts, blocks, d_model, d_ff
    experts[3, 1, 7, 11] = 31
    arrays["encoder/encoder/subblock_0/pre_mlp_layer_norm/scale"][5, 1] = 29
    model = conversion.from_t5x(write(tmp_path / "in", arrays), config)
    # Block 1 has layers 2 and 3.
    assert model.encoder.layers[3].mlp.experts.input_kernels[0].numpy()[3, 7, 11] == 31
    assert model.encoder.layers[2].pre_mlp_layer_norm.scale.numpy()[5] == 29


def test_scalable_t5s_kernels_have_an_axis_for_heads(tmp_path):
    config, arrays, num_layers = layered("t5_1_1")
    for name, values in arrays.items():
        if name.endswith(("query/kernel", "key/kernel", "value/kernel")):
            arrays[name] = values.reshape(16, 3, 4)  # d_model, heads, d_kv
        elif name.endswith("out/kernel"):
            arrays[name] = values.reshape(3, 4, 16)
    assert_same_logits(conversion.from_t5x(write(tmp_path / "single", arrays), config), "t5_1_1")
    arrays = scanned(arrays, num_layers)
    assert arrays["encoder/encoder/attention/out/kernel"].shape == (3, 2, 4, 16)
    assert_same_logits(conversion.from_t5x(write(tmp_path / "scanned", arrays), config), "t5_1_1")


def test_an_array_of_scanned_layers_is_read_once(tmp_path, monkeypatch):
    config, arrays, num_layers = layered("t5_1_0")
    folder, reads = write(tmp_path / "in", scanned(arrays, num_layers), inline=0), []

    class Counted(checkpoint_files.Tensor):
        def __new__(cls, shape, load, has_parts=False, dtype="float32"):
            return super().__new__(cls, shape, lambda: (reads.append(shape), load())[1], dtype=dtype)

    monkeypatch.setattr(t5x_file, "Tensor", Counted)
    model = conversion.from_t5x(folder, config)
    assert len(reads) == len(list(folder.iterdir())) - 1
    reads.clear()
    source = t5x.open_weights(folder, config)
    formats.Opened(source, folder).fill({
        f"model/{name}": variable for name, variable in variables_of(model).items()})
    assert len(reads) == len(list(folder.iterdir())) - 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_encoder_layers": 4}, "The checkpoint's scanned 'target/encoder/encoder/attention/query/kernel' has shape "
     "(16, 2, 12), but the configuration's encoder of 4 layers has 4 layers on axis 1; it is of another model, or was "
     "scanned along another axis."),
    ({"relative_attention_per_layer": False}, "The checkpoint has a position bias for each layer, as scanned layers of "
     "T5X do, and the configuration one for each stack; add --gin.SwitchConfig.relative_attention_per_layer=True to "
     "the --gin_file of its model."),
    ({"vocab_size": 65}, "token_embedder/embedding' has shape (64, 16), but its configuration asks for (65, 16)"),
    ({"d_ff": 25}, "has shape (16, 24), but its configuration asks for (16, 25)")])
def test_another_model_is_refused(changes, message, tmp_path):
    config, arrays, num_layers = layered("t5_1_0")
    assert message in refusal(write(tmp_path / "in", scanned(arrays, num_layers)),
                              dataclasses.replace(config, **changes))


def test_another_axis_is_refused(tmp_path):
    config, arrays, num_layers = layered("t5_1_0")
    assert "has shape (2, 16, 12), but the configuration's encoder of 2 layers has 2 layers on axis 1" in refusal(
        write(tmp_path / "in", scanned(arrays, num_layers, axis=0)), config)


def test_scanned_arrays_under_the_names_of_single_layers_are_refused(tmp_path):
    config, arrays, _ = layered("t5_1_0")
    name = "encoder/layers_0/mlp/wi/kernel"
    arrays[name] = np.stack([arrays[name]] * 2, 1)
    assert f"'target/{name}' has shape (16, 2, 24), but its configuration asks for (16, 24)" in refusal(
        write(tmp_path / "in", arrays), config)


def test_a_bias_for_each_layer_that_the_checkpoint_lacks(tmp_path):
    config, arrays = golden("t5_1_0")
    assert "the checkpoint has one for each stack; give a --gin_file without it" in refusal(
        write(tmp_path / "in", arrays), dataclasses.replace(config, relative_attention_per_layer=True))


def test_incomplete_and_contradictory_blocks(tmp_path):
    config, arrays, num_layers = layered("switch")
    whole = scanned(arrays, num_layers, SUBBLOCKS["switch"])
    missing = {name: values for name, values in whole.items() if "encoder/encoder/subblock_0" not in name}
    assert "must hold subblock_0, subblock_1 and so on, and holds subblock_1; it is incomplete" in refusal(
        write(tmp_path / "missing", missing), config)
    name = "encoder/encoder/mlp/wi/kernel"
    assert "and holds encoder itself, subblock_0, subblock_1" in refusal(
        write(tmp_path / "mixed", {**whole, name: whole["encoder/encoder/subblock_0/mlp/wi/kernel"]}), config)
    assert "encoder of 5 layers does not consist of blocks of 2" in refusal(
        write(tmp_path / "odd", whole), dataclasses.replace(config, num_encoder_layers=5))
    single = "encoder/layers_0/mlp/wi/kernel"
    assert f"holds 'target/{single}' twice" in refusal(
        write(tmp_path / "twice", {**whole, single: arrays[single]}), config)
    lost = {name: values for name, values in whole.items() if not name.endswith("subblock_1/pre_mlp_layer_norm/scale")}
    assert "lacks 'target/encoder/layers_1/pre_mlp_layer_norm/scale'" in refusal(write(tmp_path / "lost", lost), config)
