"""Weights without a run: written with the gin file of their model, read back, and on to Hugging Face."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from switch_tf import SwitchConfig, SwitchTransformer, conversion
from switch_tf.checkpoints import folders, run_folder
from switch_tf.cli import main
from switch_tf.configs import gin_syntax, parts
from switch_tf.conversion import model_gin
from switch_tf.storage import places

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"


@pytest.fixture(scope="module")
def folder(tiny_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "weights"
    model = SwitchTransformer(tiny_config)
    model.build()
    conversion.to_switch_tf(model, path)
    return path, model


def test_weights_and_configuration_come_back(folder):
    path, model = folder
    again = conversion.from_switch_tf(path)
    assert again.config == model.config
    for mine, theirs in zip(again.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    assert folders.resolve(path) == path


def test_the_gin_file_describes_the_model(folder):
    path, model = folder
    config = gin_syntax.read([str(path / "model.gin")]).check().part(parts.CONFIG).make()
    assert config == model.config


@pytest.mark.parametrize("preset", ["switch_xxl_128", "t5_1_1_small", "gshard_600b", "dense_encoder_500b"])
def test_every_field_that_differs_from_the_defaults_is_in_the_gin_file(preset, tmp_path):
    config = SwitchConfig.from_preset(preset)
    (tmp_path / "model.gin").write_text(model_gin.gin_text(config))
    again = gin_syntax.read([str(tmp_path / "model.gin")]).check().part(parts.CONFIG).make()
    assert again == config


def test_a_folder_that_holds_something_is_left_alone(folder, tmp_path):
    _, model = folder
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        conversion.to_switch_tf(model, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_says_no_configuration_is_refused(folder, tmp_path):
    path, _ = folder
    description = json.loads((path / "checkpoint.json").read_text())
    (tmp_path / "checkpoint.json").write_text(json.dumps(
        {**description, "configuration": {}, "files": {}, "sha256": None}))
    with pytest.raises(ValueError, match="does not say what model it is of"):
        conversion.from_switch_tf(tmp_path)


def test_the_command_goes_both_ways_and_keeps_every_bit(tmp_path, tiny_config, capsys):
    config = dataclasses.replace(tiny_config, num_experts=0, expert_dropout_rate=0.0, activation="geglu",
                                 logits_via_embedding=False, num_encoder_layers=1, num_decoder_layers=1)
    model = SwitchTransformer(config)
    model.build()
    conversion.to_hugging_face(model, tmp_path / "theirs")
    for source, output in (("theirs", "ours"), ("ours", "again")):
        assert main.main(["convert", "--json", "--input", str(tmp_path / source), "--output",
                          str(tmp_path / output)]) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert said["num_parameters"] == config.num_parameters
    first, last = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)
    assert (tmp_path / "theirs" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize(("files", "named"), [
    ({"spiece.model": "a model", "tokenizer.json": "{"}, "ours/spiece.model"),
    ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, "bytes"),
    ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "holds a tokenizer of type 'BPE'"), ({}, "has neither")])
def test_the_command_takes_the_vocabulary_along(files, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "t5_1_1", "theirs")
    for name, text in files.items():
        (tmp_path / "theirs" / name).write_text(text)
    assert main.main(["convert", "--json", "--input=theirs", "--output=ours"]) == 0
    told = capsys.readouterr()
    vocabulary = json.loads(told.out.splitlines()[-1])["vocabulary"]
    if named.startswith("h"):
        assert vocabulary is None and "Without a vocabulary: theirs" in told.err and named in told.err
        return
    assert vocabulary == named and f"--gin.VOCABULARY=\"'{named}'\"" in told.err
    if named != "bytes":
        assert (tmp_path / named).read_text() == "a model"
    assert main.main(["convert", "--json", "--input=ours", "--output=again"]) == 0
    assert (tmp_path / "again" / "spiece.model").exists() == (named != "bytes")
    assert ("tokenizer's files" in capsys.readouterr().err) == (named == "bytes")


def test_a_run_that_trains_in_a_bucket_is_converted_where_it_is(folder, bucket):
    """Its lease has the name of the lock that was copied with it from a disk."""
    root = places.at(bucket.new_folder())
    places.upload(folder[0], root / "run" / "checkpoints" / "step_00000000")
    (root / "run" / "lock").write_text("1")
    training = run_folder.RunFolder(root / "run")
    words = ["convert", "--input", str(root / "run"), "--output", str(root / "weights"), "--to", "switch_tf"]
    assert main.main(words) == 0
    training.close()
    assert folders.hash_of_weights(root / "weights") == folders.hash_of_weights(folder[0])


@pytest.mark.parametrize(("arguments", "message"), [
    (["--input=nowhere", "--output=x"], "--input must be a folder: Hugging Face"),
    (["--input=ours", "--output=ours"], "must be new or an empty folder"),
    (["--input=ours", "--output=x", "--to=huggingface"], "--to must be one of 'hugging_face', 'switch_tf'"),
    (["--input=ours", "--output=x", "--to=switch_tf", "--expert_capacity=3"], "is for --to=hugging_face alone"),
    (["--input=ours", "--output=x", "--expert_capacity=0"], "--expert_capacity must be an integer of at least 1"),
    (["--input=ours", "--output=x"], "expert_capacity"),
])
def test_the_commands_mistakes_are_one_sentence_and_write_nothing(arguments, message, folder, tmp_path, monkeypatch,
                                                                  capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").symlink_to(folder[0])
    assert main.main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("switch-tf convert: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
