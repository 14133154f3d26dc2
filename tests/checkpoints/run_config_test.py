"""`config.json` of a run: what comes back, and whatever else a folder from elsewhere may hold."""

import dataclasses
import json

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.checkpoints.run_config import RunConfig
from switch_tf.configs import policies

VOCABULARY = {"kind": "bytes", "name": "bytes", "size": 359, "extra_ids": 100, "file": None, "sha256": None}
CONFIG = RunConfig(SwitchConfig(num_experts=4, layer_norm_epsilon=1e-5), "mixed_bfloat16", "auto", "task",
                   {"inputs": 32, "targets": 16}, {"inputs_end": True}, {"inputs": VOCABULARY, "targets": VOCABULARY})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run_config.write(tmp_path, CONFIG)
    return tmp_path


def test_what_is_written_comes_back(folder):
    assert run_config.is_in(folder) and run_config.read(folder) == CONFIG
    (folder / run_config.FILE).write_text('{"model_type": "t5"}')
    assert not run_config.is_in(folder) and run_config.is_foreign(folder)  # Hugging Face's
    (folder / run_config.FILE).write_text("{")
    assert run_config.is_in(folder)
    (folder / "checkpoints").rmdir()
    assert not run_config.is_in(folder)


def _changed(folder, change):
    found = json.loads((folder / run_config.FILE).read_text())
    change(found)
    (folder / run_config.FILE).write_text(json.dumps(found))
    with pytest.raises(ValueError) as raised:
        run_config.read(folder)
    assert run_config.FILE in str(raised.value) and len(str(raised.value)) < 600
    return str(raised.value)


def test_a_hugging_face_folder_is_one_with_a_config_json_that_holds_no_checkpoint(folder, tmp_path_factory):
    theirs = tmp_path_factory.mktemp("theirs")
    assert not run_config.is_hugging_face(theirs) and not run_config.is_hugging_face(folder)
    (theirs / run_config.FILE).write_text('{"model_type": "t5"}')
    assert run_config.is_hugging_face(theirs)
    (theirs / "checkpoints").mkdir()
    assert run_config.is_hugging_face(theirs)
    (theirs / "checkpoints" / "step_00000010").mkdir()  # a run that was started there
    assert not run_config.is_hugging_face(theirs)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RunConfig)])
def test_every_key_has_to_be_there_and_of_its_kind(folder, name):
    for wrong in (None, [], "", 7, True, {"a": {}}, [[1]], 2**31 - 1):
        if (name, wrong) in (("activation_dtype", None), ("policies", {"a": {}}), ("reading", {"a": {}}), ("task", "")):
            continue  # the reading is looked at by what reads
        run_config.write(folder, CONFIG)
        _changed(folder, lambda found, wrong=wrong: found.update({name: wrong}))
    run_config.write(folder, CONFIG)
    assert "is missing" in _changed(folder, lambda found: found.pop(name))


@pytest.mark.parametrize("change, message", [
    (lambda found: found.update(more=1), "'more' is none of them"),
    (lambda found: found.update(format_version=2), "has format 2 and this version of switch_tf reads format 1"),
    (lambda found: found.pop("format_version"), "it has no format_version"),
    (lambda found: found["model"].update(num_layers=2), "'num_layers' is none of them"),
    (lambda found: found["model"].update(d_model="512"), "d_model must be an integer"),
    (lambda found: found["model"].update(d_model=2**31), "d_model must be an integer of at most 2147483647"),
    (lambda found: found["model"].update(num_encoder_layers=2**31 - 1), "num_encoder_layers must be at most 10000"),
    (lambda found: found["model"].update(num_decoder_layers=2**31 - 1), "num_decoder_layers must be at most 10000"),
    (lambda found: found["model"].update(dropout_rate=float("nan")), "NaN is no number of JSON"),
    (lambda found: found["model"].update(dropout_rate=float("inf")), "Infinity is no number of JSON"),
    (lambda found: found["model"].update(routing_policy={}), "routing_policy must be one of"),
    (lambda found: found["task_feature_lengths"].update(targets=2**31 - 1), "must be at most 65536"),
    (lambda found: found["model"].update(semantics="hf", expert_capacity=2**31 - 1), "expert_capacity must be at most"),
    (lambda found: found["vocabularies"].pop("inputs"), "vocabularies must describe inputs and targets"),
    (lambda found: found.update(dtype="os:system"), "dtype must be one of"),
])
def test_what_is_wrong_is_one_sentence(folder, change, message):
    assert message in _changed(folder, change)


def test_a_field_that_is_newer_than_the_run_has_its_default(folder):
    run_config.write(folder, CONFIG)
    found = json.loads((folder / "config.json").read_text())
    del found["model"]["init_scale"]
    (folder / "config.json").write_text(json.dumps(found))
    assert run_config.read(folder).model == CONFIG.model


@pytest.mark.parametrize("content, message", [
    (b"", "cannot be read"), (b"{", "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"3", "no configuration"),
    (b"[" * 100_000, "nested too deeply"), (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"), (b" " * 2**25 + b"1", "larger than"),
    (b"9" * 10_000, "cannot be read"), (b'{"format_version": 1e999}', "has format inf")])
def test_what_is_no_configuration_is_one_sentence(folder, content, message):
    (folder / run_config.FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        run_config.read(folder)
    assert len(str(raised.value)) < 400


def test_a_policy_of_the_users_own_is_named(folder, monkeypatch):
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))
    policies.register(policies.Policy("mine", "my_module:decide", is_causal=True))
    config = dataclasses.replace(CONFIG, model=SwitchConfig(num_experts=4, routing_policy="mine"),
                                 policies={"mine": "my_module:decide"})
    run_config.write(folder, config)
    assert run_config.read(folder) == config
    del policies._policies["mine"]
    with pytest.raises(ValueError, match=r"needs the routing policy 'mine' \('my_module:decide'\).*add --trust"):
        run_config.read(folder)


def test_a_checkpoint_is_compared_before_anything_is_allocated(tmp_path):
    def write(variables, size):
        (tmp_path / "state.data-00000-of-00001").write_bytes(bytes(size))
        (tmp_path / "checkpoint.json").write_text(json.dumps({
            "format_version": 3, "step": 1, "variables": variables, "files": {}}))

    config = SwitchConfig(vocab_size=8, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_encoder_layers=1,
                          num_decoder_layers=1)
    write({"model/a": {"shape": [2, 3], "dtype": "float32"}}, 4 * config.num_parameters)
    folders.check_size(config, tmp_path)
    with pytest.raises(ValueError, match="describes a model of .* parameters, and the weights of .* have"):
        folders.check_size(dataclasses.replace(config, d_ff=2**31 - 1), tmp_path)
    for wrong in (3, {}, {"shape": "22", "dtype": "float32"}, {"shape": [-1], "dtype": "float32"}):
        write({"model/a": wrong}, 9)
        with pytest.raises(BrokenCheckpoint, match="'variables' is missing or damaged"):
            folders.check_size(config, tmp_path)
    (tmp_path / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(BrokenCheckpoint, match="no readable checkpoint.json"):
        folders.check_size(config, tmp_path)
