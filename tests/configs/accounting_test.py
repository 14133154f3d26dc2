import pytest

from switch_tf.configs import accounting
from switch_tf.configs.switch_config import SwitchConfig

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


def test_experts_of_another_width_by_hand():
    small = SwitchConfig(vocab_size=10, d_model=4, d_ff=6, d_kv=2, num_heads=3, num_encoder_layers=2,
                         num_decoder_layers=1, num_experts=5, decoder_sparse_indices=(), expert_d_ff=3)
    parts = small.flops_by_part(inputs_length=7, targets_length=3)
    assert parts["feed_forward"] == 2 * (2 * 4 * 6) * (7 + 3)  # encoder layer 0, decoder layer 0
    assert parts["experts"] == 2 * (2 * 4 * 3) * 7  # encoder layer 1
    assert small.parameters_by_part()["experts"] == 5 * 2 * 4 * 3
    assert (small.axis_sizes["mlp"], small.axis_sizes["expert_mlp"]) == (6, 3)


def test_flops_of_a_step_are_the_forward_pass_and_twice_that_backward():
    small = SwitchConfig(num_experts=8, train_capacity_factor=1.5)
    parts = small.flops_by_part(inputs_length=7, targets_length=3)
    forward = small.flops_per_sequence(7, 3) + parts["attention_scores"] + parts["logits"]  # no capacity padding
    assert accounting.flops_per_step(small, batch_size=5, inputs_length=7, targets_length=3) == 3 * 5 * forward
