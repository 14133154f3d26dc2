"""Scanned layers of T5X checkpoints. Every layer has the stack's position bias, so that the logits stay PyTorch's."""

import dataclasses
import functools

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import checkpoint_files, formats, t5x, t5x_file
from switch_tf.conversion.weight_source import variables_of
from tests.conversion.shared import assert_same_logits, assert_weights_are, golden, refusal
from tests.conversion.t5x_checkpoints import scanned, with_layer_biases, write

SUBBLOCKS = {"t5_1_0": None, "t5_1_1": None, "switch": {"encoder": 2, "decoder": 2},
             "switch_step_1": {"encoder": 1, "decoder": 1}}


def layered(case):
    """The configuration, arrays of single layers with biases of their own, and those of scanned layers."""
    config, arrays = golden(case)
    num_layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    arrays = with_layer_biases(arrays, num_layers)
    return (dataclasses.replace(config, relative_attention_per_layer=True), arrays,
            functools.partial(scanned, num_layers=num_layers, subblocks=SUBBLOCKS[case]))


@pytest.mark.parametrize("case", SUBBLOCKS)
def test_weights_are_those_of_single_layers_and_logits_pytorchs(case, tmp_path):
    config, arrays, scan = layered(case)
    stacked = scan(arrays)
    assert not [name for name in stacked if "layers_" in name]
    assert sum(values.size for values in stacked.values()) == config.num_parameters
    model = conversion.from_t5x(write(tmp_path / "in", stacked), config)
    assert_weights_are(model, arrays)
    assert_same_logits(model, case)


def test_scalable_t5s_kernels_have_an_axis_for_heads(tmp_path):
    config, arrays, scan = layered("t5_1_1")
    for name, values in arrays.items():
        if name.endswith(("query/kernel", "key/kernel", "value/kernel")):
            arrays[name] = values.reshape(16, 3, 4)  # d_model, heads, d_kv
        elif name.endswith("out/kernel"):
            arrays[name] = values.reshape(3, 4, 16)
    of_scan = scan(arrays)
    assert of_scan["encoder/encoder/attention/out/kernel"].shape == (3, 2, 4, 16)
    for name, one in (("single", arrays), ("scanned", of_scan)):
        assert_same_logits(conversion.from_t5x(write(tmp_path / name, one), config), "t5_1_1")


def test_an_array_of_scanned_layers_is_read_once(tmp_path, monkeypatch):
    config, arrays, scan = layered("t5_1_0")
    folder, reads = write(tmp_path / "in", scan(arrays), inline=0), []

    class Counted(checkpoint_files.Tensor):
        def __new__(cls, shape, load, has_parts=False, dtype="float32"):
            return super().__new__(cls, shape, lambda: (reads.append(shape), load())[1], dtype=dtype)

    monkeypatch.setattr(t5x_file, "Tensor", Counted)
    model = conversion.from_t5x(folder, config)
    assert len(reads) == len(list(folder.iterdir())) - 1
    reads.clear()
    formats.Opened(t5x.open_weights(folder, config), folder).fill({
        f"model/{name}": variable for name, variable in variables_of(model).items()})
    assert len(reads) == len(list(folder.iterdir())) - 1


@pytest.mark.parametrize(("changes", "axis", "message"), [
    ({"num_encoder_layers": 4}, 1, "The checkpoint's scanned 'target/encoder/encoder/attention/query/kernel' has shape "
     "(16, 2, 12), but the configuration's encoder of 4 layers has 4 layers on axis 1; it is of another model, or was "
     "scanned along another axis."),
    ({"relative_attention_per_layer": False}, 1, "The checkpoint has a position bias for each layer, as scanned layers "
     "of T5X do, and the configuration one for each stack; add "
     "--gin.SwitchConfig.relative_attention_per_layer=True to the --gin_file of its model."),
    ({"vocab_size": 65}, 1, "token_embedder/embedding' has shape (64, 16), but its configuration asks for (65, 16)"),
    ({"d_ff": 25}, 1, "has shape (16, 24), but its configuration asks for (16, 25)"),
    ({}, 0, "has shape (2, 16, 12), but the configuration's encoder of 2 layers has 2 layers on axis 1")])
def test_another_model_or_axis_is_refused(changes, axis, message, tmp_path):
    config, arrays, scan = layered("t5_1_0")
    assert message in refusal(conversion.from_t5x, write(tmp_path / "in", scan(arrays, axis=axis)),
                              dataclasses.replace(config, **changes))


WI = "encoder/layers_0/mlp/wi/kernel"


def test_arrays_of_single_layers_that_fit_no_configuration_are_refused(tmp_path):
    config, arrays, _ = layered("t5_1_0")
    stacked = {**arrays, WI: np.stack([arrays[WI]] * 2, 1)}
    assert f"'target/{WI}' has shape (16, 2, 24), but its configuration asks for (16, 24)" in refusal(
        conversion.from_t5x, write(tmp_path / "stacked", stacked), config)
    assert "the checkpoint has one for each stack; give a --gin_file without it" in refusal(
        conversion.from_t5x, write(tmp_path / "biases", golden("t5_1_0")[1]), config)


def test_incomplete_and_contradictory_blocks(tmp_path):
    config, arrays, scan = layered("switch")
    whole = scan(arrays)
    lost = "subblock_1/pre_mlp_layer_norm/scale"
    for name, changed, num_layers, message in (
            ("missing", {name: whole[name] for name in whole if "encoder/encoder/subblock_0" not in name}, 4,
             "must hold subblock_0, subblock_1 and so on, and holds subblock_1; it is incomplete"),
            ("mixed", {**whole, "encoder/encoder/mlp/wi/kernel": whole["encoder/encoder/subblock_0/mlp/wi/kernel"]}, 4,
             "and holds encoder itself, subblock_0, subblock_1"),
            ("odd", whole, 5, "encoder of 5 layers does not consist of blocks of 2"),
            ("twice", {**whole, WI: arrays[WI]}, 4, f"holds 'target/{WI}' twice"),
            ("lost", {name: whole[name] for name in whole if not name.endswith(lost)}, 4,
             "lacks 'target/encoder/layers_1/pre_mlp_layer_norm/scale'")):
        assert message in refusal(conversion.from_t5x, write(tmp_path / name, changed),
                                  dataclasses.replace(config, num_encoder_layers=num_layers))
