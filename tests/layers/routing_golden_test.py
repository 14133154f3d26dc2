"""Every policy decides as tests/golden/routing.json says: cases worked out by hand, each with its arithmetic."""

import fractions
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import losses
from switch_tf.configs import choices, policies
from switch_tf.configs.semantics import Grouping
from switch_tf.layers import Router, grouping
from switch_tf.ops import random
from tests.layers.switch_layers import built

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "routing.json").read_text())
CASES = GOLDEN["cases"]


def numbers(nested):
    """A nested list of fractions, written as strings, as <float64>."""
    return np.vectorize(lambda text: float(fractions.Fraction(text)))(nested)


def route(case, **arguments):
    """Decisions and statistics of the router whose logits are the logarithms of the case's odds.

    What is not real is not there at all, so that the cases mean the same where padding is routed.
    """
    is_real = np.array(case["is_real"], bool)[None]
    if "token_ids" in case:
        inputs, num_experts = np.zeros((*is_real.shape, 1), "float32"), case["num_experts"]
    else:
        inputs = np.log(np.array(case["odds"], "float32"))[None]
        num_experts = inputs.shape[-1]
    router = built(Router(num_experts, **{**case["router"], **arguments}), num_experts,
                   *[np.eye(num_experts)] * ("odds" in case))
    token_ids = None if "odds" in case else tf.constant([case["token_ids"]])
    return router(inputs, padding_mask=is_real, expert_capacity=case["expert_capacity"], token_ids=token_ids,
                  training=case.get("training", False), is_present=is_real)


@pytest.fixture
def given_uniforms(monkeypatch):
    """Lets the router draw the case's numbers, and nothing where the case has none."""

    def give(case):
        def uniform(seed, shape):
            assert tuple(shape) == (1, len(case["uniforms"]), 1)
            return tf.constant(case["uniforms"])[None, :, None]

        monkeypatch.setattr(random, "uniform", uniform)

    return give


def test_there_is_a_case_for_every_policy_and_every_rule_for_second_experts():
    assert {case["router"]["policy"] for case in CASES.values()} == set(policies.names())
    rules = {case["router"].get("second_expert_policy") for case in CASES.values()}
    assert rules >= set(choices.SECOND_EXPERT_POLICIES)
    assert all(len(case["source"]) > 50 for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_decisions(name, given_uniforms):
    case = CASES[name]
    given_uniforms(case)
    decisions, stats = route(case)
    np.testing.assert_allclose(decisions.gate[0], numbers(case["gate"]), rtol=2e-6)
    is_real = np.array(case["is_real"], bool)
    if "token_index" in case:
        np.testing.assert_array_equal(decisions.token_index[0], case["token_index"])
        served = set(np.ravel(case["token_index"]).tolist()) - {len(is_real)}
    else:
        np.testing.assert_array_equal(decisions.slot[0], case["slot"])
        is_kept = np.array(case["slot"]) < case["expert_capacity"]
        np.testing.assert_array_equal(
            np.asarray(decisions.expert_index[0])[is_kept], np.array(case["expert_index"])[is_kept])
        served = np.flatnonzero(is_kept.any(-1))
    assert stats.fraction_tokens_dropped == (is_real.sum() - len(served), is_real.sum())


def cases_with(key):
    return pytest.mark.parametrize("name", [name for name, case in CASES.items() if key in case])


@cases_with("load_balancing_loss")
def test_load_balancing_loss(name):
    case = CASES[name]
    for semantics, expected in case["load_balancing_loss"].items():
        _, stats = route(case, semantics=semantics)
        np.testing.assert_allclose(
            stats.load_balancing_loss.value, float(fractions.Fraction(expected)), rtol=2e-6, err_msg=semantics)


@cases_with("second_place_loss")
def test_half_of_the_second_place_loss_comes_on_top(name):
    case = CASES[name]
    first, second = (float(fractions.Fraction(text))
                     for text in (case["load_balancing_loss"]["switch_tf"], case["second_place_loss"]))
    _, stats = route(case, second_place_loss_weight=0.5)
    np.testing.assert_allclose(stats.load_balancing_loss.value, first + 0.5 * second, rtol=2e-6)


@cases_with("normalizers")
def test_router_z_loss(name, given_uniforms):
    given_uniforms(CASES[name])
    _, stats = route(CASES[name])
    np.testing.assert_allclose(
        stats.router_z_loss.value, np.mean(np.log(CASES[name]["normalizers"]) ** 2), rtol=2e-6)


def test_the_hash_policy_has_no_z_loss():
    assert float(route(CASES["hash"])[1].router_z_loss.value) == 0


# T5X: gates and the balance loss of several choices, and the rounding of capacities.


@pytest.mark.parametrize("name, gates", [
    # The probabilities as they are, in tenths and twentieths, where GShard divides them by their sum.
    ("batch_prioritized, 2 choices", [[0, 0], [0.6, 0.3], [0, 0], [0.7, 0.2], [0.5, 0.3]]),
    ("top2, all", [[0.4, 0.3], [0.6, 0], [0, 0], [0, 0.2], [0.5, 0.3]]),
    ("top_n, 3 choices", [[0.4, 0.2, 0.2], [0.5, 0.25, 0], [0, 0, 0], [0.45, 0.3, 0], [0, 0.2, 0]]),
])
def test_t5x_does_not_renormalise_gates(name, gates):
    decisions, _ = route(CASES[name], semantics="t5x")
    np.testing.assert_allclose(decisions.gate[0], gates, rtol=2e-6)
    np.testing.assert_array_equal(decisions.slot[0], CASES[name]["slot"])


@pytest.mark.parametrize("num_choices", [1, 2, 3])
@pytest.mark.parametrize("semantics", ["switch_tf", "mtf", "t5x"])
def test_at_balance_the_loss_is_1_and_by_t5x_the_number_of_choices(num_choices, semantics):
    # Token i of 4 chooses experts i, i + 1, ...; the router's mean probabilities are even.
    index = (np.arange(4)[None, :, None] + np.arange(num_choices)) % 4
    loss = losses.load_balancing_loss(np.full((1, 4, 4), 0.25, "float32"), index, semantics=semantics)
    np.testing.assert_allclose(loss, num_choices if semantics == "t5x" else 1, rtol=1e-6)


@pytest.mark.parametrize("row", GOLDEN["capacities"]["rows"], ids=str)
@pytest.mark.parametrize("semantics", ["switch_tf", "mtf", "t5x"])
def test_capacity(row, semantics):
    values = dict(zip(GOLDEN["capacities"]["columns"], row, strict=True))
    for tokens in (values["tokens"], tf.constant(values["tokens"])):
        sizes = Grouping(values["experts"], train_capacity_factor=values["factor"],
                         min_expert_capacity=values["minimum"], semantics=semantics)
        capacity = grouping.expert_capacity(tokens, sizes, training=True)
        assert int(capacity) == values[semantics]
