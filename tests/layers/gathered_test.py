"""Rows by their own experts' kernels are those that buffers make."""

import keras
import numpy as np
import pytest
from keras import ops

from switch_tf.configs import policies
from switch_tf.layers import ExpertFeedForward, Router, dispatch
from switch_tf.layers.decisions import TokenChoices
from tests.layers.switch_layers import built

NUM_EXPERTS, D_MODEL, D_FF = 5, 6, 8
RANDOM = np.random.default_rng(0)


def make_experts(activation="relu", **options):
    return built(ExpertFeedForward(NUM_EXPERTS, D_FF, activation, **options), D_MODEL, scale=0.4)


@pytest.mark.parametrize("policy, activation", [
    *((name, "geglu") for name in sorted(policies.names()) if not policies.get(name).experts_choose),
    ("switch", "relu"), ("switch", "silu")])
def test_tokens_come_back_as_from_buffers(policy, activation):
    router = Router(NUM_EXPERTS, {"top_n": 3}.get(policy), policy=policy, init_scale=1.0)
    tokens = RANDOM.standard_normal((3, 4, D_MODEL)).astype("float32")
    is_real = np.asarray([[True] * 4, [True, True, False, False], [False, True, True, True]])
    decisions, _ = router(tokens, padding_mask=is_real, expert_capacity=1,
                          token_ids=RANDOM.integers(0, 50, (3, 4)).astype("int32"))
    assert not np.all(decisions.is_filled)
    experts = make_experts(activation)
    found = dispatch.Gathered(decisions).run(experts, tokens, training=False)
    expected = dispatch.Index(decisions).run(experts, tokens, training=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.all(ops.convert_to_numpy(found)[~is_real] == 0)


def test_each_row_by_hand_also_of_another_width_and_in_bfloat16():
    rows, index = RANDOM.standard_normal((4, D_MODEL)).astype("float32"), np.asarray([3, 0, 3, 4], "int32")
    for dtype, rounding in (("float32", 1e-5), ("mixed_bfloat16", 0.05)):
        experts = make_experts(output_dim=3, dtype=dtype)
        wi, wo = (ops.convert_to_numpy(kernel).astype("float64") for kernel in (experts.input_kernels[0], experts.wo))
        expected = [np.maximum(row @ wi[expert], 0) @ wo[expert] for row, expert in zip(rows, index, strict=True)]
        # The only group's four tokens, each with one choice.
        slots = np.zeros((1, 4, 1), "int32")
        decisions = TokenChoices(index[None, :, None], slots, np.ones((1, 4, 1), "float32"), NUM_EXPERTS, 1)
        found = dispatch.Gathered(decisions).compute(experts, ops.cast(rows, experts.compute_dtype), training=False)
        assert found.shape == (4, 3) and keras.backend.standardize_dtype(found.dtype) == experts.compute_dtype
        np.testing.assert_allclose(ops.cast(found, "float32"), expected, rtol=rounding, atol=rounding)


def test_it_is_for_prediction_alone():
    decisions, _ = Router(NUM_EXPERTS)(np.ones((1, 4, D_MODEL), "float32"), expert_capacity=1)
    with pytest.raises(ValueError, match="for prediction alone"):
        dispatch.Gathered(decisions).run(make_experts(), np.zeros((1, 4, D_MODEL), "float32"), training=True)
