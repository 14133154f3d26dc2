import json

import pytest

from switch_tf import SwitchConfig
from switch_tf.cli import main
from switch_tf.optim import factoring


def _inspect(capsys, *arguments):
    assert main.main(["inspect", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize(("preset", "shown"), [("switch_base_128", "7.42B"), ("switch_xxl_128", "394.7B"),
                                               ("switch_c_2048", "1571.3B")])
def test_the_totals_of_the_paper_are_shown(capsys, preset, shown):
    result, text = _inspect(capsys, preset)
    assert shown in text
    assert result["num_parameters"] == SwitchConfig.from_preset(preset).num_parameters
    assert result["flops_per_sequence"] == SwitchConfig.from_preset(preset).flops_per_sequence()
    assert result["bytes"]["weights"] == 4 * result["num_parameters"]


def test_optimizer_bytes_are_adafactors_factored_slots(capsys):
    result, _ = _inspect(capsys, "switch_tiny")
    config = SwitchConfig.from_preset("switch_tiny")
    # embedding: 4096 + 128; each attention kernel: 128 + 4 * 32
    assert factoring.num_slot_elements((4096, 128), ("vocab", "embed")) == 4096 + 128
    assert factoring.num_slot_elements((128, 4, 32), ("embed", "heads", "kv")) == 128 + 128
    assert result["bytes"]["optimizer"] == 4 * sum(
        weight.count * factoring.num_slot_elements(weight.shape, weight.axes) for weight in config.weights())


def test_lengths_change_the_flops_alone(capsys):
    short, _ = _inspect(capsys, "t5_small", "--inputs_length=256", "--targets_length=57")
    full, _ = _inspect(capsys, "t5_small")
    assert 2 * short["flops_per_sequence"] == full["flops_per_sequence"]
    assert short["num_parameters"] == full["num_parameters"]


def test_a_gin_file_with_bindings_can_be_inspected(capsys, tmp_path):
    (tmp_path / "mine.gin").write_text("include 'gin/models/switch_tiny.gin'\nNUM_EXPERTS = 4\n")
    four, _ = _inspect(capsys, str(tmp_path / "mine.gin"))
    sixteen, _ = _inspect(capsys, "switch_tiny", "--gin.NUM_EXPERTS=16")
    assert four["num_parameters"] < 3280640 < sixteen["num_parameters"]


def test_a_checkpoint_is_inspected_from_its_description(capsys, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps({
        "step": 4, "files": {"state.index": 10, "state.data": 90},
        "variables": {"model/a": {"shape": [2, 3]}, "optimizer/b": {"shape": [5]}}}))
    result, _ = _inspect(capsys, str(tmp_path / "run"))
    assert (result["step"], result["num_parameters"]) == (4, 6)
    assert result["bytes"] == {"weights": 24, "optimizer": 20, "on_disk": 100}


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "Name what to inspect"),
    (["switch_tiny", "--gin.SwitchConfig.num_heads=0"], "num_heads must be an integer of at least 1, not 0"),
    (["switch_tiny", "--inputs_length=0"], "--inputs_length must be at least 1"),
    (["."], "holds no checkpoint"),
])
def test_mistakes_are_one_sentence(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main.main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_every_preset_is_listed(capsys):
    assert main.main(["inspect", "--list"]) == 0
    assert {"switch_base_8", "t5_11b", "mt5_xxl", "mswitch_base_128"} <= set(capsys.readouterr().out.split())
