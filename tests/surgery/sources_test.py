"""Which configurations can become which."""

import dataclasses

import pytest

from switch_tf import SwitchConfig
from switch_tf.surgery import sources

SPARSE = SwitchConfig(d_model=16, d_ff=24, num_experts=6, encoder_sparse_step=2, decoder_sparse_step=2)
DENSE = dataclasses.replace(SPARSE, num_experts=0)


@pytest.mark.parametrize(("width", "slices"), [(None, 1), (24, 1), (12, 2), (8, 3), (4, 6)])
def test_the_number_of_slices_is_the_ratio_of_the_widths(width, slices):
    assert sources.check_compatible(DENSE, dataclasses.replace(SPARSE, expert_d_ff=width)) == slices


@pytest.mark.parametrize(("changes", "message"), [
    ({"d_model": 32}, "d_model must be the same in both models, and it is 16 in --from and 32 in the model file; only "
                      "experts and routers may differ."),
    ({"num_decoder_layers": 4}, "num_decoder_layers must be the same .* 6 in --from and 4 in"),
    ({"activation": "gelu"}, "activation must be the same .* 'relu' in --from and 'gelu' in"),
    ({"scale_decoder_outputs": False}, "scale_decoder_outputs must be the same .* True in --from and False in"),
    ({"relative_attention_per_layer": True}, "relative_attention_per_layer must be the same"),
    ({"num_experts": 0}, "must describe a model with sparse layers, and its num_experts is 0"),
    ({"encoder_sparse_step": 0, "decoder_sparse_step": 0}, "must describe a model with sparse layers"),
    ({"extra_mlp": True}, "extra_mlp must be False, not True"),
    ({"expert_sublayers": "attention"}, "expert_sublayers must be 'feed_forward', not 'attention'"),
    ({"expert_d_ff": 6}, r"expert_d_ff must be d_ff / k, for a k that divides d_ff \(24\) and num_experts \(6\), not"),
    ({"expert_d_ff": 7}, "expert_d_ff must be d_ff / k"), ({"expert_d_ff": 48}, "expert_d_ff must be d_ff / k")])
def test_the_first_difference_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sources.check_compatible(DENSE, dataclasses.replace(SPARSE, **changes))


def test_a_sparse_model_is_not_upcycled_again():
    with pytest.raises(ValueError, match="--from must be a dense model, with num_experts=0, and its num_experts is 6"):
        sources.check_compatible(SPARSE, SPARSE)


def test_equal_logits_are_no_difference_however_they_are_written():
    sources.check_compatible(dataclasses.replace(DENSE, scale_decoder_outputs=True), SPARSE)


@pytest.mark.parametrize("num_experts", [1, 5])
def test_a_model_may_have_any_smaller_number_of_experts(num_experts):
    smaller = sources.reduce_experts(SPARSE, num_experts)
    assert smaller == dataclasses.replace(SPARSE, num_experts=num_experts)


@pytest.mark.parametrize(("config", "num_experts", "message"), [
    (SPARSE, 6, "--num_experts must be below the experts of a layer of --from, 6, not 6."),
    (SPARSE, 0, "--num_experts must be an integer of at least 1, not 0."),
    (DENSE, 1, "--num_experts must be below the experts of a layer of --from, 0, not 1."),
    (dataclasses.replace(SPARSE, decoder_routing_policy="hash"), 2, "The hash policy assigns tokens to experts by"),
    (dataclasses.replace(SPARSE, routing_policy="top2", decoder_routing_policy="switch"), 1,
     "A token cannot go to 2 of 1 experts; use at least 2 experts")])
def test_what_cannot_shrink_is_refused(config, num_experts, message):
    with pytest.raises(ValueError, match=message):
        sources.reduce_experts(config, num_experts)
