"""Weights without a run: written with the gin file of their model, read back, and on to Hugging Face."""

import dataclasses
import json

import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.checkpoints import folders, run_folder
from switch_tf.cli import main
from switch_tf.configs import gin_syntax, parts
from switch_tf.conversion import model_gin
from switch_tf.storage import places
from tests.conversion import numpy_reader
from tests.conversion.shared import assert_same_values, built, copy, refusal, values_of


@pytest.fixture(scope="module")
def folder(tiny_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "weights"
    model = built(tiny_config)
    conversion.to_switch_tf(model, path)
    return path, model


def convert(*words):
    return main.main(["convert", "--json", *words])


def test_weights_and_configuration_come_back(folder):
    path, model = folder
    again = conversion.from_switch_tf(path)
    assert again.config == model.config
    assert_same_values(values_of(again), values_of(model))
    assert folders.resolve(path) == path


def config_in(file):
    return gin_syntax.read([str(file)]).check().part(parts.CONFIG).make()


@pytest.mark.parametrize("preset", ["switch_xxl_128", "t5_1_1_small", "gshard_600b", "dense_encoder_500b"])
def test_every_field_that_differs_from_the_defaults_is_in_the_gin_file(preset, folder, tmp_path):
    config = SwitchConfig.from_preset(preset)
    (tmp_path / "model.gin").write_text(model_gin.gin_text(config))
    assert config_in(tmp_path / "model.gin") == config
    assert config_in(folder[0] / "model.gin") == folder[1].config


def test_a_folder_that_holds_something_is_left_alone(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "must be new or an empty folder" in refusal(conversion.to_switch_tf, folder[1], tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_says_no_configuration_is_refused(folder, tmp_path):
    description = json.loads((folder[0] / "checkpoint.json").read_text())
    (tmp_path / "checkpoint.json").write_text(json.dumps(
        {**description, "configuration": {}, "files": {}, "sha256": None}))
    assert "does not say what model it is of" in refusal(conversion.from_switch_tf, tmp_path)


def test_the_command_goes_both_ways_and_keeps_every_bit(tmp_path, tiny_config, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(tiny_config, num_experts=0, expert_dropout_rate=0.0, activation="geglu",
                                 logits_via_embedding=False, num_encoder_layers=1, num_decoder_layers=1)
    conversion.to_hugging_face(built(config), "theirs")
    for source, output in (("theirs", "ours"), ("ours", "again")):
        assert convert(f"--input={source}", f"--output={output}") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_parameters"] == config.num_parameters
    (description, tensors), again = (numpy_reader.read(tmp_path / name) for name in ("theirs", "again"))
    assert_same_values(tensors, again[1])
    assert description == again[0]


@pytest.mark.parametrize(("files", "named"), [
    ({"spiece.model": "a model", "tokenizer.json": "{"}, "ours/spiece.model"),
    ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, "bytes"),
    ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "holds a tokenizer of type 'BPE'"), ({}, "has neither")])
def test_the_command_takes_the_vocabulary_along(files, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy("t5_1_1", tmp_path / "theirs")
    for name, text in files.items():
        (tmp_path / "theirs" / name).write_text(text)
    assert convert("--input=theirs", "--output=ours") == 0
    told = capsys.readouterr()
    vocabulary = json.loads(told.out.splitlines()[-1])["vocabulary"]
    if named.startswith("h"):
        assert vocabulary is None and "Without a vocabulary: theirs" in told.err and named in told.err
        return
    assert vocabulary == named and f"--gin.VOCABULARY=\"'{named}'\"" in told.err
    if named != "bytes":
        assert (tmp_path / named).read_text() == "a model"
    assert convert("--input=ours", "--output=again") == 0
    assert (tmp_path / "again" / "spiece.model").exists() == (named != "bytes")
    assert ("tokenizer's files" in capsys.readouterr().err) == (named == "bytes")


def test_a_run_that_trains_in_a_bucket_is_converted_where_it_is(folder, bucket):
    """Its lease has the name of the lock that was copied with it from a disk."""
    root = places.at(bucket.new_folder())
    places.upload(folder[0], root / "run" / "checkpoints" / "step_00000000")
    (root / "run" / "lock").write_text("1")
    training = run_folder.RunFolder(root / "run")
    assert convert("--input", str(root / "run"), "--output", str(root / "weights"), "--to", "switch_tf") == 0
    training.close()
    assert folders.hash_of_weights(root / "weights") == folders.hash_of_weights(folder[0])


@pytest.mark.parametrize(("words", "message"), [
    ("--input=nowhere --output=x", "--input must be a folder: Hugging Face"),
    ("--input=ours --output=ours", "must be new or an empty folder"),
    ("--input=ours --output=x --to=huggingface", "--to must be one of 'hugging_face', 'switch_tf'"),
    ("--input=ours --output=x --to=switch_tf --expert_capacity=3", "is for --to=hugging_face alone"),
    ("--input=ours --output=x --expert_capacity=0", "--expert_capacity must be an integer of at least 1"),
    ("--input=ours --output=x", "expert_capacity"),
    ("--input=ours --output=x --to=switch_tf --dtype=bfloat16",
     "--dtype=bfloat16 is for --to=hugging_face alone; weights are float32 in switch_tf."),
    ("--input=ours --output=x --dtype=float16", "--dtype must be one of 'float32', 'bfloat16'")])
def test_the_commands_mistakes_are_one_sentence_and_write_nothing(words, message, folder, tmp_path, monkeypatch,
                                                                  capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").symlink_to(folder[0])
    assert main.main(["convert", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("switch-tf convert: ") and error.count("\n") == 1
    assert not (tmp_path / "x").exists()
