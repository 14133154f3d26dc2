"""Routing, capacity and losses agree with Mesh TensorFlow's, the Switch Transformer's original implementation.

The numbers of tests/golden/mesh_tensorflow.json were computed by Mesh TensorFlow in float32 and are given to 7 or 8
digits, hence the bar of 1e-6. `by_definition` repeats their arithmetic in float64, so that a typing error would show.
"""

import json
import pathlib

import numpy as np
import pytest

from switch_tf import losses
from switch_tf.layers import Router, SwitchFeedForward

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "mesh_tensorflow.json").read_text())
MORE = json.loads((FOLDER / "routing.json").read_text())["mesh_tensorflow"]
TOLERANCE = 1e-6


def inputs():
    random = np.random.RandomState(0)
    x = random.randn(1, 2, 6, 5).astype("float32")[0]
    kernel = random.randn(5, 3).astype("float32")
    is_real = np.ones((2, 6), bool)
    is_real[tuple(np.transpose(GOLDEN["padding"]))] = False
    return x * is_real[..., None], kernel, is_real


def route(semantics, use_mask=True, **arguments):
    x, kernel, is_real = inputs()
    router = Router(3, semantics=semantics, **arguments)
    router.build(x.shape)
    router.kernel.assign(kernel)
    return router(x, padding_mask=is_real if use_mask else None, expert_capacity=GOLDEN["expert_capacity"])


@pytest.fixture(scope="module")
def by_definition():
    """The golden losses from their formulas, in float64."""
    x, kernel, is_real = inputs()
    logits = x.astype(np.float64) @ kernel.astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choices = np.eye(3)[logits.argmax(-1)]
    share = is_real.mean(1)
    per_group = 3 * (choices.mean(1) * probs.mean(1)).sum(-1)
    masked = [(a * is_real[..., None]).sum(1) / is_real.sum(1)[:, None] for a in (choices, probs)]
    normalised = 3 * (masked[0] * masked[1]).sum(-1)
    return {
        "load_balancing_loss_without_mask": per_group.mean(),
        "load_balancing_loss_with_mask": (per_group * share).mean(),
        "router_z_loss": (np.log(np.exp(logits).sum(-1)) ** 2)[is_real].mean(),
        "mean_of_normalised_groups": normalised.mean(),
    }


def test_the_golden_numbers_follow_from_their_formulas(by_definition):
    for name, value in by_definition.items():
        assert abs(GOLDEN[name] - value) < TOLERANCE, name


@pytest.mark.parametrize("semantics, use_mask, name", [
    ("mtf", False, "load_balancing_loss_without_mask"),
    ("switch_tf", False, "load_balancing_loss_without_mask"),
    ("mtf", True, "load_balancing_loss_with_mask"),
])
def test_load_balancing_loss(semantics, use_mask, name):
    _, stats = route(semantics, use_mask)
    difference = abs(float(stats.load_balancing_loss.value) - GOLDEN[name])
    print(f"{semantics}, mask {use_mask}: difference of the load-balancing loss {difference:.1e}")
    assert difference < TOLERANCE


def probabilities():
    x, kernel, _ = inputs()
    logits = x @ kernel
    return (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype("float32")


def test_normalised_load_balancing_loss():
    index, (_, _, is_real) = np.array(GOLDEN["expert_index"]), inputs()
    per_group = [float(losses.load_balancing_loss(probabilities()[g:g + 1], index[g:g + 1], is_real[g:g + 1]))
                 for g in range(2)]
    assert abs(np.mean(per_group) - GOLDEN["mean_of_normalised_groups"]) < TOLERANCE
    # The plain mean is Lingvo's rule. Over both groups this package weights them by their real tokens, so that every
    # token counts alike: 1.2523225, where the plain mean is 1.2809931. Theirs are 0.79200566 and, without the mask,
    # 1.0610981, which count padding (above).
    expected = (4 * per_group[0] + 5 * per_group[1]) / 9
    assert abs(expected - 1.2523225) < TOLERANCE
    _, stats = route("switch_tf")
    assert abs(float(stats.load_balancing_loss.value) - expected) < TOLERANCE


def test_load_balancing_loss_weighted_by_tokens():
    _, stats = route("switch_tf")
    assert abs(float(stats.load_balancing_loss.value) - MORE["by_tokens"]) < TOLERANCE


@pytest.mark.parametrize("arguments", [{"policy": "top2"}, {"policy": "top_n", "num_selected_experts": 2},
                                       {"policy": "batch_prioritized", "num_selected_experts": 2}])
def test_load_balancing_loss_of_two_choices(arguments):
    # Mesh TensorFlow masks both factors there, and divides both by all tokens.
    x, kernel, is_real = inputs()
    logits = x.astype(np.float64) @ kernel.astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shares, means = ((a * is_real[..., None]).mean(1) for a in (np.eye(3)[logits.argmax(-1)], probs))
    assert abs(3 * (shares * means).sum(-1).mean() - MORE["top_2"]) < TOLERANCE
    _, stats = route("mtf", **arguments)
    assert abs(float(stats.load_balancing_loss.value) - MORE["top_2"]) < TOLERANCE


def test_load_balancing_loss_from_probabilities():
    _, _, is_real = inputs()
    probs = probabilities()
    loss = losses.load_balancing_loss(probs, np.array(GOLDEN["expert_index"]), is_real, semantics="mtf")
    assert abs(float(loss) - GOLDEN["load_balancing_loss_with_mask"]) < TOLERANCE


@pytest.mark.parametrize("semantics", ["mtf", "switch_tf"])
def test_router_z_loss(semantics):
    _, stats = route(semantics)
    difference = abs(float(stats.router_z_loss.value) - GOLDEN["router_z_loss"])
    print(f"{semantics}: difference of the router z-loss {difference:.1e}")
    assert difference < TOLERANCE


def test_experts_drops_and_gates():
    x, kernel, is_real = inputs()
    decisions, stats = route("mtf")
    np.testing.assert_array_equal(decisions.expert_index[..., 0], GOLDEN["expert_index"])
    slot, gate = np.asarray(decisions.slot)[..., 0], np.asarray(decisions.gate)[..., 0]
    is_kept = slot < GOLDEN["expert_capacity"]
    assert np.argwhere(is_real & ~is_kept).tolist() == GOLDEN["dropped_real_tokens"]
    assert not is_kept[~is_real].any()
    assert not gate[~is_kept].any()
    # The gate is the probability of the chosen expert.
    logits = x.astype(np.float64) @ kernel
    top = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).max(-1)
    np.testing.assert_allclose(gate[is_kept], top[is_kept], atol=TOLERANCE)
    np.testing.assert_allclose(stats.fraction_tokens_dropped.value, 1 / 9, rtol=1e-6)


def test_the_layer_zeroes_padding_itself_as_every_layer_of_theirs_does():
    # Theirs zeroes padding before every layer, and counts its rows: uniform probabilities, and the first expert.
    x, kernel, is_real = inputs()
    layer = SwitchFeedForward(3, d_ff=4, group_size=6, eval_capacity_factor=1.0, min_expert_capacity=1, semantics="mtf")
    layer.build(x.shape)
    layer.router.kernel.assign(kernel)
    anything = np.where(is_real[..., None], x, np.random.RandomState(2).randn(*x.shape)).astype("float32")
    assert np.abs(anything[~is_real]).min() > 0
    _, stats = layer.forward(anything, padding_mask=is_real)
    assert abs(float(stats.load_balancing_loss.value) - GOLDEN["load_balancing_loss_with_mask"]) < TOLERANCE
    assert abs(float(stats.router_z_loss.value) - GOLDEN["router_z_loss"]) < TOLERANCE


def test_the_layer_gives_dropped_tokens_and_padding_nothing():
    x, kernel, is_real = inputs()
    # 6 tokens, 3 experts, capacity factor 1: 2 slots each, as in the golden run.
    layer = SwitchFeedForward(3, d_ff=4, group_size=6, eval_capacity_factor=1.0, min_expert_capacity=1, semantics="mtf")
    layer.build(x.shape)
    layer.router.kernel.assign(kernel)
    layer.experts.input_kernels[0].assign(np.random.RandomState(1).randn(3, 5, 4))
    is_zero = ~np.asarray(layer(x, padding_mask=is_real)).any(-1)
    expected = ~is_real
    expected[0, 3] = True
    np.testing.assert_array_equal(is_zero, expected)
