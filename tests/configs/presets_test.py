import gin
import pytest

from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig


def test_an_unknown_preset_is_answered_with_the_nearest_one():
    with pytest.raises(ValueError, match="There is no preset 'switch_bas_8'. Did you mean 'switch_base_8'?"):
        SwitchConfig.from_preset("switch_bas_8")


def test_from_preset_leaves_the_callers_gin_configuration_alone():
    gin.parse_config("NAME = 3")
    before = gin.config_str()
    assert SwitchConfig.from_preset("switch_base_8").d_model == 768
    assert gin.config_str() == before


def test_a_preset_includes_shipped_files_only_and_logs_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "gin" / "models").mkdir(parents=True)
    (tmp_path / "gin" / "models" / "t5_1_1_small.gin").write_text("not gin")  # which t5_1_1_base.gin includes
    monkeypatch.chdir(tmp_path)
    assert SwitchConfig.from_preset("t5_1_1_base").d_model == 768
    assert not caplog.records


def test_every_preset_reads_and_every_sparse_one_can_be_split():
    for name in shipped_gin.preset_names():
        preset = SwitchConfig.from_preset(name)
        if preset.num_experts:
            expected = {"switch_tiny": 8, "gshard_600b": 2048}.get(name, min(preset.num_experts, 512))
            assert preset.num_groups_multiple == expected, name


def test_tiny_presets_divide_by_4_devices_of_a_model_axis():
    for name in ("switch_tiny", "t5_tiny"):
        tiny = SwitchConfig.from_preset(name)
        sizes = (tiny.num_heads, tiny.d_model, tiny.d_ff, tiny.d_kv, tiny.vocab_size)
        assert all(size % 4 == 0 for size in sizes)
        assert tiny.vocab_size == 4096
