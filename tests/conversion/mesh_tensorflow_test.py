"""Checkpoints of Mesh TensorFlow, against logits that it computed, and PyTorch, of the same weights."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.cli import main
from switch_tf.conversion import checkpoint_files, mesh_tensorflow_file, model_gin
from tests.conversion import from_bucket
from tests.conversion.mesh_tensorflow_checkpoints import variables_from, write
from tests.conversion.shared import BLOCKS, arrays_of, assert_same_logits, built, golden_variables, refusal

# The block of Mesh TensorFlow's bi_moe.gin: experts first, wider than dense layers, and two experts for each token.
EXPERTS_FIRST = SwitchConfig(
    vocab_size=32, d_model=8, d_ff=12, d_kv=3, num_heads=2, num_encoder_layers=4, num_decoder_layers=2, num_experts=4,
    expert_d_ff=20, encoder_sparse_indices=(0, 2), decoder_sparse_indices=(0,), routing_policy="top2",
    decoder_routing_policy="switch", semantics="mtf")
FEATURES = {"encoder_input_tokens": np.array([[5, 9, 3, 1, 0], [7, 2, 8, 6, 1]]),
            "decoder_input_tokens": np.array([[0, 4, 11], [0, 21, 3]])}


refused = functools.partial(refusal, conversion.from_mesh_tensorflow)


@pytest.mark.parametrize("case", BLOCKS)
def test_logits_are_pytorchs(case, tmp_path):
    config, variables = golden_variables(case)
    # All weights are there: embedding, logits, two biases, two final norms, and those of the layers.
    assert sum(values.size for values in variables.values()) == config.num_parameters
    model = conversion.from_mesh_tensorflow(write(tmp_path, variables), config)
    assert model.config == config and {weight.dtype for weight in model.weights} == {"float32"}
    assert_same_logits(model, case)


def test_old_names_of_norms_slots_and_shards(tmp_path):
    config, variables = golden_variables("t5_1_0", norm="layer_norm")
    assert "encoder/final_layer_norm/scale" in variables and not any("rms_norm" in name for name in variables)
    write(tmp_path, variables, has_slots=True, num_shards=2)
    assert (tmp_path / "model.ckpt-7.data-00001-of-00002").exists()
    assert_same_logits(conversion.from_mesh_tensorflow(tmp_path, config), "t5_1_0")


def test_experts_first_in_a_block_and_wider_than_dense_layers(tmp_path):
    ours = built(EXPERTS_FIRST)
    variables = {name.replace("switch_gating", "top_2_gating") if name.startswith("encoder") else name: values
                 for name, values in variables_from(arrays_of(ours), 2).items()}
    # A block is [SelfAttention, MoE1D, SelfAttention, DenseReluDense], in the decoder with attention to the encoder.
    for name, shape in (("encoder/block_001/layer_001/MoE1D/wi/kernel", (4, 8, 20)),
                        ("encoder/block_001/layer_001/MoE1D/top_2_gating/kernel", (8, 4)),
                        ("encoder/block_001/layer_003/DenseReluDense/wi/kernel", (8, 12)),
                        ("encoder/block_001/layer_000/SelfAttention/q", (8, 6)),
                        ("decoder/block_000/layer_002/MoE1D/wo/kernel", (4, 20, 8))):
        assert variables[name].shape == shape
    model = conversion.from_mesh_tensorflow(write(tmp_path, variables), EXPERTS_FIRST)
    np.testing.assert_array_equal(model(FEATURES), ours(FEATURES))


def test_position_biases_of_layers(tmp_path):
    config = SwitchConfig(vocab_size=32, d_model=8, d_ff=12, d_kv=3, num_heads=2, num_encoder_layers=4,
                          num_decoder_layers=2, relative_attention_per_layer=True)
    ours = built(config)
    folder = write(tmp_path, variables_from(arrays_of(ours)))
    np.testing.assert_array_equal(conversion.from_mesh_tensorflow(folder, config)(FEATURES), ours(FEATURES))
    assert refused(folder, dataclasses.replace(config, relative_attention_per_layer=False)) == (
        "The checkpoint's encoder has a position bias for each layer, and the configuration one for each stack; add "
        "--gin.SwitchConfig.relative_attention_per_layer=True to the --gin_file of its model.")


def test_the_command_takes_the_model_from_gin_files_and_the_path_of_one_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, variables = golden_variables("switch")
    write(tmp_path / "theirs", variables)
    write(tmp_path / "theirs", {"something": np.ones((2,), "float32")}, step=8)
    (tmp_path / "model.gin").write_text(model_gin.gin_text(config))
    command = ["convert", "--json", "--gin_file=model.gin"]
    assert main.main([*command, "--input=theirs/model.ckpt-7", "--output=ours"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["to"]) == ("mesh_tensorflow", "switch_tf")
    assert_same_logits(conversion.from_switch_tf("ours"), "switch")
    assert main.main([*command, "--input=theirs", "--output=newest"]) == 2
    assert "model.ckpt-8 must hold 'shared/embedding'" in capsys.readouterr().err
    assert not (tmp_path / "newest").exists()


def test_a_folder_in_a_bucket_is_read_there_without_graphs_and_events(bucket, tmp_path, monkeypatch):
    config, variables = golden_variables("t5_1_0")
    folder = write(tmp_path / "in", variables)
    for name in ("graph.pbtxt", "events.out.tfevents.1", "model.ckpt-7.meta", "operative_config.gin"):
        (folder / name).write_bytes(bytes(10**6))
    num_bytes = from_bucket.convert(folder, bucket, monkeypatch, tmp_path / "ours", config)
    assert_same_logits(conversion.from_switch_tf(tmp_path / "ours"), "t5_1_0")
    assert num_bytes < 10**6


def test_the_model_is_needed_and_presets_of_its_size_are_named(tmp_path):
    config = SwitchConfig.from_preset("t5_tiny")
    sizes = config.vocab_size, config.num_parameters - config.vocab_size
    folder = write(tmp_path, dict(zip(("shared/embedding", "rest"), map(np.zeros, sizes), strict=True)), has_slots=True)
    assert refused(folder, None) == (
        f"A Mesh TensorFlow checkpoint does not describe its model, so {folder} of {config.num_parameters:,} "
        "parameters needs a configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python; "
        "gin/models/t5_tiny.gin has as many parameters.")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Configuration and folder of golden checkpoints, which tests leave as they are."""
    written = {}
    for case in ("t5_1_0", "switch"):
        config, variables = golden_variables(case)
        written[case] = config, write(tmp_path_factory.mktemp(case), variables)
    return written


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("t5_1_0", {"vocab_size": 65}, "shared/embedding' has shape (64, 16), but its configuration asks for (65, 16)"),
    ("t5_1_0", {"d_model": 12}, "shared/embedding' has shape (64, 16), but its configuration asks for (64, 12)"),
    ("t5_1_0", {"num_encoder_layers": 3}, "encoder has 2 layers, but its configuration asks for 3; give the"),
    ("t5_1_0", {"num_decoder_layers": 2}, "decoder has 3 layers, but its configuration asks for 2"),
    ("t5_1_0", {"activation": "geglu"}, "holds 'decoder/block_000/layer_002/DenseReluDense/wi/kernel', for which a"),
    ("t5_1_0", {"num_heads": 6, "d_kv": 2}, "bias' has shape (3, 8), but its configuration asks for (6, 8)"),
    ("t5_1_0", {"logits_via_embedding": False}, "lacks 'decoder/logits/kernel' of shape (16, 64)"),
    ("t5_1_0", {"num_experts": 4, "extra_mlp": True}, "into a model with extra_mlp=True; give the configuration"),
    ("t5_1_0", {"relative_attention_per_layer": True}, "'encoder/block_001/layer_000/SelfAttention/relative_att"),
    ("t5_1_0", {"num_experts": 4}, "encoder has no experts, but its configuration asks for experts in layers 1, "
     "counted from 0; give the --gin_file of a dense model."),
    ("switch", {"encoder_sparse_indices": (0, 2)}, "encoder has experts in layers 1, 3, but its "
     "configuration asks for experts in layers 0, 2, counted from 0; add "
     "--gin.SwitchConfig.encoder_sparse_indices=\"(1,3)\"."),
    ("switch", {"num_experts": 0, "semantics": "switch_tf", "expert_capacity": None, "expert_dropout_rate": 0.0},
     "experts in layers 1, 3, but its configuration asks for no experts, counted from 0; give the --gin_file "
     "of a sparse model."),
    ("switch", {"num_experts": 8}, "MoE1D/switch_gating/kernel' has shape (16, 4), but its configuration asks for "
     "(16, 8)"),
    ("switch", {"expert_d_ff": 32}, "MoE1D/wi/kernel' has shape (4, 16, 24), but its configuration asks for (4, 16, "),
    ("switch", {"routing_policy": "batch_prioritized", "decoder_routing_policy": "switch"},
     "routers of switch_gating, which is 'switch' here, but its configuration asks for 'batch_prioritized'; add "
     "--gin.SwitchConfig.routing_policy=\"'switch'\".")])
def test_another_model_is_refused_before_a_value_is_read(case, changes, message, written, monkeypatch):
    config, folder = written[case]
    monkeypatch.setattr(checkpoint_files.Tensor, "read", lambda self: pytest.fail("read a value"))
    assert message in refused(folder, dataclasses.replace(config, **changes))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("^encoder/block_001/layer_003/MoE1D/wi/.*", "", "The checkpoint lacks 'encoder/block_001/layer_003/MoE1D/wi/kernel"
     "' of shape (4, 16, 24), which holds the weight 'encoder/layers_3/mlp/experts/wi'; give the"),
    ("^encoder/block_001/layer_003/MoE1D/switch.*", "", "lacks 'encoder/block_001/layer_003/MoE1D/switch_gating/kernel'"
     " of"),
    ("^encoder/block_001/layer_003/MoE1D/.*", "", "holds the norm of encoder/block_001/layer_003 and nothing else"),
    ("^encoder/block_001/layer_003/.*", "", "The checkpoint lacks encoder/block_001/layer_003, and has other layers "
     "of"),
    ("^encoder/block_000/.*", "", "The checkpoint lacks encoder/block_000/layer_000, and has"),
    ("^decoder/block_000/layer_005/.*", "", "must repeat SelfAttention, EncDecAttention, DenseReluDense or MoE1D, but "
     "it ends with decoder/block_000/layer_004, which is EncDecAttention"),
    ("^decoder/rms_norm/.*", "", "The checkpoint lacks 'decoder/rms_norm/scale' of shape (16,)"),
    ("^shared/.*", "", "model.ckpt-7 must hold 'shared/embedding', as Mesh TensorFlow's models of encoder and decoder "
     "do"),
    ("layer_001/DenseReluDense/wi/kernel", "layer_001/DenseReluDense/wi/bias", "No rule knows the checkpoint's tensor"),
    ("SelfAttention", "TalkingHeadsSelfAttention", "holds ['TalkingHeadsSelfAttention'], and a layer of Mesh"),
    ("SelfAttention", "ExpertsSelfAttention", "encoder/block_000/layer_000 holds ['ExpertsSelfAttention'], and a"),
    ("SelfAttention", "EncDecAttention", "must repeat SelfAttention, DenseReluDense or MoE1D, but "
     "encoder/block_000/layer_000 is EncDecAttention"),
    ("encoder/rms_norm/scale", "shared/positional_embedding", "has learned positions ('shared/positional_embedding')"),
    ("MoE1D", "MoE2D", "holds ['MoE2D'], and a layer of Mesh TensorFlow that is read holds one of DenseReluDense, ")])
def test_missing_variables_and_other_layers(old, new, message, written, monkeypatch):
    """The reader sees the variables of a checkpoint under other names, and not those with an empty name."""
    config, folder = written["switch"]
    open_variables = mesh_tensorflow_file.open_variables
    monkeypatch.setattr(mesh_tensorflow_file, "open_variables", lambda *arguments: {
        shown: tensor for name, tensor in open_variables(*arguments).items() if (shown := re.sub(old, new, name))})
    assert message in refused(folder, config)


def test_values_that_are_not_finite(tmp_path):
    config, variables = golden_variables("t5_1_0")
    variables["shared/embedding"][0, 0] = np.inf
    assert "'shared/embedding' in" in refused(write(tmp_path, variables), config)
