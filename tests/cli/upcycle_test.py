import dataclasses
import functools

import numpy as np
import pytest

from switch_tf import SwitchTransformer, conversion
from switch_tf.conversion import model_gin, t5x, weight_source
from switch_tf.storage import lock
from tests.conversion import mesh_tensorflow_checkpoints
from tests.conversion.t5x_checkpoints import write


@pytest.fixture(scope="module")
def folder(shallow_config, tmp_path_factory):
    """A folder with a dense model in four formats, a sparse one, and a model file of it."""
    path = tmp_path_factory.mktemp("models")
    config = dataclasses.replace(shallow_config, expert_dropout_rate=0.0)
    dense = SwitchTransformer(dataclasses.replace(config, num_experts=0))
    dense.build()
    conversion.to_switch_tf(dense, path / "dense", vocabulary=b"a model")
    conversion.to_hugging_face(dense, path / "theirs")
    variables = weight_source.variables_of(dense)
    arrays = {name.removeprefix("target/"): values for link in t5x.RULES.link(weight_source.weights_of(dense.config))
              for name, values in link.to_theirs(variables[link.ours].numpy())}
    write(path / "t5x", arrays)
    mesh_tensorflow_checkpoints.write(path / "mesh", mesh_tensorflow_checkpoints.variables_from(arrays))
    sparse = SwitchTransformer(config)
    sparse.build()
    conversion.to_switch_tf(sparse, path / "experts")
    (path / "sparse.gin").write_text(model_gin.gin_text(config))
    return path


@pytest.fixture
def upcycle(folder, monkeypatch, call):
    """A function that upcycles in that folder; returns the JSON object, if any, and the text."""
    monkeypatch.chdir(folder)
    return functools.partial(call, "upcycle --gin_file=sparse.gin --json")


def test_any_format_becomes_the_same_model_file_and_weights(upcycle, tmp_path):
    made = {}
    for source in ("dense", "theirs", "t5x", "mesh"):
        result, text = upcycle(f"--from={source}", f"--output={tmp_path / source}", "--noise=0.1", "--seed=3")
        assert result["format"] == {"dense": "switch_tf", "theirs": "hugging_face", "t5x": "t5x",
                                    "mesh": "mesh_tensorflow"}[source]
        made[source] = conversion.from_switch_tf(tmp_path / source)
        assert result["num_parameters"] == made[source].config.num_parameters > result["num_dense_parameters"]
        assert (result["num_experts"], result["slices"]) == (4, 1)
        assert result["sparse_layers"] == ["encoder/layers_0", "decoder/layers_0"]
        assert "2 sparse layers of 4 experts, each a copy of the dense layer." in text
        assert f"--gin_file={tmp_path / source}/model.gin" in text
    for mine, *others in zip(*(model.weights for model in made.values()), strict=True):
        for other in others:
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
    assert (tmp_path / "dense" / "spiece.model").read_bytes() == b"a model"
    assert not (tmp_path / "theirs" / "spiece.model").exists() and "Without a vocabulary: mesh has neither" in text


def test_a_token_that_gets_too_few_slices_is_told_of(upcycle, tmp_path):
    result, text = upcycle("--from=dense", "--gin.SwitchConfig.expert_d_ff=16", f"--output={tmp_path / 'out'}")
    assert (result["slices"], result["expert_width"]) == (2, 16)
    assert "each one of 2 slices of the dense layer" in text
    assert ("A token of the encoder gets 1 of the 2 slices; routing_policy='top_n' with num_selected_experts=2 gives "
            "it all of them.") in text


@pytest.mark.parametrize(("words", "share", "text"), [
    ([], 0.33, "The gates of a token add up to 0.3289 to 0.333 in the sparse layers, so these start with"),
    (["--gate_scale=auto"], 0.33, "--gate_scale=auto was 3.003 to 3.04 and keeps the mean size of the layers' outputs"),
    (["--gin.SwitchConfig.routing_policy='hash'"], 1.0, "--gate_scale=1 keeps the function of the dense model"),
    (["--gin.SwitchConfig.routing_policy='top_n'", "--gin.SwitchConfig.num_selected_experts=2",
      "--gin.SwitchConfig.expert_d_ff=16", "--gin.SwitchConfig.allow_non_causal_decoder=True"], 1.0,
     "so these start with 0.5 of the dense layers' outputs; --gate_scale=auto (2) keeps the function of the dense")])
def test_the_size_of_a_sparse_layer_is_told(words, share, text, upcycle, tmp_path):
    result, shown = upcycle("--from=dense", f"--output={tmp_path / 'out'}", *words)
    assert text in shown, shown
    assert list(result["gate_sums"].values()) == pytest.approx([share] * 2, rel=0.1)


@pytest.mark.parametrize("words, message", {
    "--from=nowhere": "--from must be a folder: Hugging Face's, which holds config.json",
    "--from=dense --gin_file=gin/models/switch_tiny.gin":
        "vocab_size must be the same in both models, and it is 384 in --from and 4096 in the model file",
    "--from=theirs --gin_file=sparse.gin --gin.SwitchConfig.d_ff=48":
        "d_ff must be the same in both models, and it is 32 in --from and 48 in the model file",
    "--from=experts --gin_file=sparse.gin": "--from must be a dense model, with num_experts=0",
    "--from=dense --gin_file=sparse.gin --gin.NUM_EXPERTS=0": "must describe a model with sparse layers",
    "--from=dense": "These gin files describe no model: none.",
    "--from=dense --gin_file=sparse.gin --noise=-1": "noise must be a number 0 or above, not -1.0.",
    "--from=dense --gin_file=sparse.gin --reinitialize=1": "reinitialize must be a number in [0, 1)",
    "--from=dense --gin_file=sparse.gin --output=theirs": "must be new or an empty folder",
    "--from=dense --gin_file=sparse.gin --output=held": "is writing 'held'"}.items())
def test_mistakes_are_one_sentence_and_write_nothing(words, message, refused, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    with lock.held("held"):
        assert message in refused(f"upcycle --output=x {words}")
