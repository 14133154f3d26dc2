"""T5X checkpoints, against logits that PyTorch computed of the same weights."""

import dataclasses
import functools
import json
import sys
import warnings

import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.cli import main
from switch_tf.conversion import checkpoint_files, formats, model_gin
from tests.conversion import from_bucket
from tests.conversion.shared import BLOCKS, GOLDEN, assert_same_logits, assert_weights_are, golden, refusal
from tests.conversion.t5x_checkpoints import write

ARRAY = "target.encoder.layers_0.mlp.wi.kernel"
refused = functools.partial(refusal, conversion.from_t5x)


@pytest.fixture
def dense(tmp_path):
    """Configuration and folder of a dense model's checkpoint."""
    config, arrays = golden("t5_1_0")
    return config, write(tmp_path / "in", arrays)


def convert(*words):
    """Returns the status of the command that converts into the folder `out`."""
    return main.main(["convert", "--json", "--output=out", *words])


@pytest.mark.parametrize("case", BLOCKS)
def test_logits_are_pytorchs(case, tmp_path):
    config, arrays = golden(case)
    # All weights are there: embedding, logits, two biases, two final norms, and those of the layers.
    assert sum(values.size for values in arrays.values()) == config.num_parameters
    folder = write(tmp_path / "checkpoint_7", arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = conversion.from_t5x(folder, config)
    assert model.config == config
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
    assert_weights_are(model, rounded)
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
    attention = {"query/kernel": (8, 6), "key/kernel": (8, 6), "value/kernel": (8, 6), "out/kernel": (6, 8)}
    mlp = {"wi_0/kernel": (8, 12), "wi_1/kernel": (8, 12), "wo/kernel": (12, 8)}
    sparse = {"router/router_weights/w/kernel": (8, 2), **{f"expert/{name}": (2, *mlp[name]) for name in mlp}}
    groups = {"encoder/layers_0/attention": attention, "encoder/layers_0/mlp": mlp,
              "encoder/layers_1/attention": attention, "encoder/layers_1/mlp": sparse,
              "encoder/layers_1/extra_mlp": mlp, "decoder/layers_0/self_attention": attention,
              "decoder/layers_0/encoder_decoder_attention": attention, "decoder/layers_0/mlp": sparse,
              "decoder/layers_0/extra_mlp": mlp}
    norms = ("encoder/encoder_norm", "decoder/decoder_norm", *(
        f"encoder/layers_{norm}_layer_norm" for norm in ("0/pre_attention", "0/pre_mlp", "1/pre_attention", "1/pre_mlp",
                                                         "1/pre_extra_mlp")), *(
        f"decoder/layers_0/pre_{norm}_layer_norm" for norm in ("self_attention", "cross_attention", "mlp",
                                                               "extra_mlp")))
    shapes = {**{f"{group}/{name}": groups[group][name] for group in groups for name in groups[group]},
              **{f"{norm}/scale": (8,) for norm in norms},
              "token_embedder/embedding": (24, 8), "decoder/logits_dense/kernel": (8, 24),
              "encoder/relpos_bias/rel_embedding": (2, 32), "decoder/relpos_bias/rel_embedding": (2, 32)}
    random = np.random.RandomState(0)
    arrays = {name: random.randn(*shape).astype("float32") for name, shape in shapes.items()}
    assert_weights_are(conversion.from_t5x(write(tmp_path / "in", arrays), config), arrays)


def test_the_command_takes_the_model_from_gin_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, arrays = golden("switch")
    write(tmp_path / "checkpoint_7", arrays)
    (tmp_path / "model.gin").write_text(model_gin.gin_text(config))
    command = ["--input=checkpoint_7", "--gin_file=model.gin"]
    assert convert(*command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["to"]) == ("t5x", "switch_tf")
    assert_same_logits(conversion.from_switch_tf("out"), "switch")
    assert convert(*command, "--output=theirs", "--to=hugging_face") == 0
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
    size = config.vocab_size
    folder = write(tmp_path / "in", {"token_embedder/embedding": np.zeros((size, 1)),
                                     "rest": np.zeros(config.num_parameters - size)})
    assert refused(folder, None) == (
        f"A T5X checkpoint does not describe its model, so {folder} of {config.num_parameters:,} parameters needs a "
        "configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python; gin/models/t5_tiny.gin has "
        "as many parameters.")


def test_a_model_file_for_a_folder_that_describes_its_model_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert(f"--input={GOLDEN / 't5_1_1'}", "--gin_file=gin/models/t5_small.gin") == 2
    assert "describes its model itself" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("t5_1_0", {"vocab_size": 65}, "embedding' has shape (64, 16), but its configuration asks for (65, 16)"),
    ("t5_1_0", {"num_encoder_layers": 3}, "lacks 'target/encoder/layers_2/"),
    ("t5_1_0", {"num_decoder_layers": 2}, "holds 'target/decoder/layers_2/"),
    ("t5_1_0", {"activation": "geglu"}, "holds 'target/encoder/layers_0/mlp/wi/kernel', for which a model of this "
     "configuration"),
    ("t5_1_0", {"num_heads": 6, "d_kv": 2}, "rel_embedding' has shape (3, 8), but its configuration asks for (6, 8)"),
    ("t5_1_0", {"logits_via_embedding": False}, "lacks 'target/decoder/logits_dense/kernel' of shape (16, 64)"),
    ("t5_1_0", {"num_experts": 4, "expert_dropout_rate": 0.1}, "holds 'target/encoder/layers_1/mlp/wi/kernel', for "
     "which"),
    ("switch", {"num_experts": 8}, "has shape (16, 4), but its configuration asks for (16, 8)"),
    ("switch", {"encoder_sparse_indices": (0, 1, 2, 3)}, "holds 'target/encoder/layers_0/mlp/"),
    ("switch", {"num_experts": 0, "semantics": "switch_tf", "expert_capacity": None, "expert_dropout_rate": 0.0},
     "for which a model of this configuration has no place")])
def test_another_model_is_refused_before_a_value_is_read(case, changes, message, tmp_path, monkeypatch):
    config, arrays = golden(case)
    folder = write(tmp_path / "in", arrays)
    monkeypatch.setattr(checkpoint_files.Tensor, "read", lambda self: pytest.fail("read a value"))
    assert message in refused(folder, dataclasses.replace(config, **changes))


def test_a_missing_and_a_surplus_array(tmp_path):
    config, arrays = golden("t5_1_0")
    name = "encoder/layers_1/pre_mlp_layer_norm/scale"
    norm = arrays.pop(name)
    assert refused(write(tmp_path / "a", arrays), config) == (
        f"The checkpoint lacks 'target/{name}' of shape (16,), which holds the weight '{name}'; give the --gin_file of "
        "its model, or download it again if it is incomplete.")
    arrays |= {name: norm, "encoder/layers_1/mlp/wi/bias": norm}
    assert refused(write(tmp_path / "b", arrays), config) == (
        "No rule knows the checkpoint's tensor 'target/encoder/layers_1/mlp/wi/bias'; exactly one must, so that "
        "nothing is lost or taken twice.")


def test_a_flipped_bit_in_a_chunk(dense):
    config, folder = dense
    chunk = folder / ARRAY / "0.1"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    assert "cannot be read" in refused(folder, config)


def test_missing_and_damaged_descriptions_of_arrays(dense, tmp_path):
    config, folder = dense
    array = folder / ARRAY
    description = array / ".zarray"
    content = json.loads(description.read_text())
    for changes, message in (({"shape": "none"}, "cannot be read"), ({"chunks": [10**6, 10**6]}, "in chunks of"),
                             ({"dtype": "<i4"}, "must be float32, bfloat16 or float16, but")):
        description.write_text(json.dumps({**content, **changes}))
        assert message in refused(folder, config)
    description.unlink()
    message = refused(folder, config)
    assert f"The checkpoint lacks {description}" in message and "download that folder too." in message
    array.rename(tmp_path / "elsewhere")
    array.symlink_to(tmp_path / "elsewhere")
    description.write_text(json.dumps(content))
    assert "must be a regular file" in refused(folder, config)


def test_values_that_are_not_finite(tmp_path):
    config, arrays = golden("t5_1_0")
    arrays["encoder/layers_0/mlp/wi/kernel"][0, 0] = np.inf
    assert "'target/encoder/layers_0/mlp/wi/kernel' in" in refused(write(tmp_path / "in", arrays), config)


def test_without_the_extra_one_sentence_names_it(dense, monkeypatch):
    config, folder = dense
    monkeypatch.setitem(sys.modules, "msgpack", None)
    message = refused(folder, config)
    assert "A T5X checkpoint is read with msgpack" in message and "pip install 'switch-tf[t5x]'" in message
    assert formats.find(folder) is formats.T5X  # recognised without them


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "x"')
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert "must be a T5X checkpoint, a folder such as checkpoint_1000000" in refused(folder, SwitchConfig())
