import dataclasses

import gin
import pytest

from switch_tf import config, shipped_gin
from switch_tf.config import SwitchConfig

# Published counts (paper, T5 and T5X documentation; numerics derived in docs/models.md), to the digits they print.
PUBLISHED_PARAMETERS = {
    "t5_small": ("60.5M", 1e6), "t5_base": ("222.9M", 1e6), "t5_large": ("737.7M", 1e6), "t5_3b": ("2.85B", 1e9),
    "t5_11b": ("11.3B", 1e9), "t5_1_1_small": ("77.0M", 1e6), "t5_1_1_base": ("247.6M", 1e6),
    "t5_1_1_large": ("783.2M", 1e6), "t5_1_1_xl": ("2.85B", 1e9), "t5_1_1_xxl": ("11.1B", 1e9),
    "switch_base_16": ("1.07B", 1e9), "switch_base_32": ("1.98B", 1e9), "switch_base_64": ("3.79B", 1e9),
    "switch_base_128": ("7.42B", 1e9), "switch_base_256": ("14.66B", 1e9), "switch_large_128": ("26.3B", 1e9),
    "switch_xxl_128": ("394.7B", 1e9), "switch_c_2048": ("1571.3B", 1e9),
}
# Table 9 of the paper, FLOPs per sequence.
TABLE_9_FLOPS = {"t5_base_paper": 124e9, "t5_large_paper": 425e9, "t5_xxl_paper": 6.3e12, "switch_base_paper": 124e9,
                 "switch_large_paper": 425e9, "switch_xxl_paper": 6.3e12}


@pytest.mark.parametrize("preset", PUBLISHED_PARAMETERS)
def test_presets_have_the_published_number_of_parameters(preset):
    printed, unit = PUBLISHED_PARAMETERS[preset]
    decimals = len(printed[:-1].partition(".")[2])
    assert f"{SwitchConfig.from_preset(preset).num_parameters / unit:.{decimals}f}" == printed[:-1]


def test_parameters_of_a_small_model_by_hand():
    small = SwitchConfig(vocab_size=10, d_model=4, d_ff=6, d_kv=2, num_heads=3, num_encoder_layers=2,
                         num_decoder_layers=1, num_experts=5, encoder_sparse_step=2, decoder_sparse_step=1,
                         relative_attention_num_buckets=8)
    assert small.parameters_by_part() == {
        "embedding": 10 * 4,
        "attention": (2 + 2 * 1) * 4 * (4 * 3 * 2),  # 2 encoder layers with one attention, 1 decoder layer with two
        "position_bias": 2 * 3 * 8,
        "norm": (2 * 2 + 1) * 4 + (3 * 1 + 1) * 4,
        "feed_forward": 2 * 4 * 6,  # encoder layer 0
        "router": 2 * 4 * 5,  # encoder layer 1, decoder layer 0
        "experts": 2 * 5 * (2 * 4 * 6),
    }
    assert small.num_parameters == sum(small.parameters_by_part().values())


@pytest.mark.parametrize("preset", TABLE_9_FLOPS)
def test_flops_per_sequence_follow_table_9(preset):
    flops = SwitchConfig.from_preset(preset).flops_per_sequence()
    assert flops == pytest.approx(TABLE_9_FLOPS[preset], rel=0.09)


def test_flops_of_switch_c_exceed_table_9_by_their_routers():
    switch_c = SwitchConfig.from_preset("switch_c_paper")
    parts = switch_c.flops_by_part()
    assert switch_c.flops_per_sequence() == pytest.approx(890e9 * 1.17, rel=0.005)
    assert switch_c.flops_per_sequence() - parts["router"] == pytest.approx(890e9 * 1.08, rel=0.005)


def test_flops_of_a_small_model_by_hand():
    small = SwitchConfig(vocab_size=10, d_model=4, d_ff=6, d_kv=2, num_heads=3, num_encoder_layers=2,
                         num_decoder_layers=1, num_experts=5, decoder_sparse_step=0, train_capacity_factor=1.5)
    parts = small.flops_by_part(inputs_length=7, targets_length=3)
    matrix = 4 * 3 * 2  # d_model x heads x d_kv
    # q, k, v and out of 2 x 7 encoder and 3 decoder tokens; cross-attention: q, out of 3 tokens, k, v of 7
    assert parts["attention"] == 2 * (4 * matrix * (2 * 7 + 3) + 2 * matrix * 3 + 2 * matrix * 7)
    assert parts["feed_forward"] == 2 * (2 * 4 * 6) * (7 + 3)  # encoder layer 0, decoder layer 0
    assert parts["experts"] == 2 * (2 * 4 * 6) * 7  # encoder layer 1
    assert parts["router"] == 2 * (4 * 5) * 7
    # two products over heads x d_kv for each pair of positions
    assert parts["attention_scores"] == 2 * 2 * 6 * (2 * 7 * 7 + 3 * 3 + 3 * 7)
    assert parts["logits"] == 2 * 4 * 10 * 3
    assert parts["capacity_padding"] == parts["experts"] // 2
    assert small.flops_per_sequence(7, 3) == sum(parts[p] for p in ("attention", "feed_forward", "experts", "router"))


def test_sparse_layers_are_the_last_of_each_step():
    layers = SwitchConfig(num_encoder_layers=12, num_decoder_layers=3, num_experts=2, encoder_sparse_step=4,
                          decoder_sparse_step=1)
    assert layers.encoder_sparse_layers == (3, 7, 11)
    assert layers.decoder_sparse_layers == (0, 1, 2)
    assert layers.sparse_layer_names == ("encoder/layers_3", "encoder/layers_7", "encoder/layers_11",
                                         "decoder/layers_0", "decoder/layers_1", "decoder/layers_2")


def test_hugging_face_semantics_count_sparse_layers_from_layer_1():
    layers = SwitchConfig(num_encoder_layers=12, num_experts=2, encoder_sparse_step=4, decoder_sparse_step=0,
                          semantics="hf", expert_capacity=64)
    assert layers.encoder_sparse_layers == (1, 5, 9)
    assert layers.decoder_sparse_layers == ()


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_heads": 0}, "num_heads must be an integer of at least 1, not 0"),
    ({"d_model": 8.0}, "d_model must be an integer of at least 1, not 8.0"),
    ({"num_experts": -1}, "num_experts must be an integer of at least 0, not -1"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), not 1.0"),
    ({"train_capacity_factor": 0}, "train_capacity_factor must be a number above 0, not 0"),
    ({"activation": "geglue"}, "activation must be one of 'relu', 'geglu', not 'geglue'. Did you mean 'geglu'?"),
    ({"semantics": "t5"}, "semantics must be one of"),
    ({"expert_capacity": 64}, "expert_capacity=64 belongs to a sparse model with semantics='hf'"),
    ({"semantics": "hf", "num_experts": 8}, "expert_capacity must be an integer of at least 1, not None"),
    ({"relative_attention_max_distance": 16}, "relative_attention_max_distance must be above half"),
])
def test_impossible_values_are_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        SwitchConfig(**changes)
    assert "\n" not in str(raised.value)


def test_an_unknown_preset_is_answered_with_the_nearest_one():
    with pytest.raises(ValueError, match="There is no preset 'switch_bas_8'. Did you mean 'switch_base_8'?"):
        SwitchConfig.from_preset("switch_bas_8")


@pytest.mark.parametrize("is_locked", [False, True])
def test_from_preset_leaves_the_callers_gin_configuration_as_it_was(is_locked):
    gin.clear_config()
    gin.parse_config("from __gin__ import dynamic_registration\nfrom switch_tf import config\n"
                     "config.SwitchConfig.d_model = 12\nNAME = 3")
    if is_locked:
        gin.finalize()
    before, prefixes = gin.config_str(), list(gin.config._LOCATION_PREFIXES)
    assert SwitchConfig.from_preset("switch_base_8").d_model == 768
    assert gin.config_str() == before
    assert gin.config_is_locked() == is_locked
    assert prefixes == gin.config._LOCATION_PREFIXES
    assert gin.get_configurable(SwitchConfig)().d_model == 12
    gin.clear_config()


def test_every_preset_reads_and_every_sparse_one_can_be_split():
    for name in shipped_gin.preset_names():
        preset = SwitchConfig.from_preset(name)
        if preset.num_experts:
            expected = {"switch_tiny": 8, "gshard_600b": 2048}.get(name, min(preset.num_experts, 512))
            assert preset.num_groups_multiple == expected, name


def test_tiny_presets_divide_by_8_devices():
    for name in ("switch_tiny", "t5_tiny"):
        tiny = SwitchConfig.from_preset(name)
        sizes = (tiny.num_heads, tiny.d_model, tiny.d_ff, tiny.d_kv, tiny.vocab_size)
        assert all(size % 4 == 0 for size in sizes)
        assert tiny.vocab_size == 4096


def test_configs_can_be_changed_field_by_field():
    changed = dataclasses.replace(SwitchConfig.from_preset("switch_tiny"), num_experts=4)
    assert changed.num_experts == 4


def test_nearest_says_nothing_where_nothing_is_near():
    assert config.nearest("xyzzy", ["switch_base_8"]) == ""
