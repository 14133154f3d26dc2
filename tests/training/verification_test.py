"""What two outcomes of the same steps differ in, and how much the order of float64 sums may explain."""

import numpy as np
import pytest

from switch_tf.training import verification
from switch_tf.training.verification import Difference, Outcome


def _outcome(gradient=4.0, weight=1.0, losses=(2.0, 1.0)):
    gradients = [np.ones(4), np.full(200, 4.0)]
    gradients[1][0] = gradient
    return Outcome(list(losses), gradients, [np.ones(4), np.full(4, weight)], ["a", "b"])


def _compare(**changes):
    return verification.compare(_outcome(), _outcome(**changes))


def test_outcomes_that_are_equal_differ_in_nothing():
    found = _compare()
    assert (found.loss.value, found.gradient.value, found.later_loss.value, found.weight.value) == (0, 0, 0, 0)
    assert found.losses == [(2.0, 2.0), (1.0, 1.0)] and found.is_equal


def test_differences_are_relative_and_name_their_tensor_or_step():
    found = _compare(gradient=3.0, weight=1.5, losses=(2.0, 1.5))
    assert found.gradient == (0.25, "b") and found.weight == (0.5, "b")
    assert found.loss == (0.0, "step 1") and found.later_loss == (0.5, "step 2")


@pytest.mark.parametrize("changes", [
    {"gradient": 4.0 * (1 + 1e-12)}, {"weight": 1 + 1e-12}, {"losses": (2.0 * (1 + 1e-12), 1 - 1e-12)}])
def test_the_order_of_float64_sums_is_no_difference(changes):
    assert _compare(**changes).is_equal


@pytest.mark.parametrize("changes", [
    {"gradient": 4.0001}, {"weight": 1.00001}, {"losses": (2.00002, 1.0)}, {"losses": (2.0, 1.00001)},
    {"gradient": np.nan}, {"weight": np.nan}])
def test_one_entry_that_is_wrong_by_a_hundred_thousandth_is_one(changes):
    assert not _compare(**changes).is_equal


def test_what_is_not_a_number_is_the_largest_difference():
    assert _compare(weight=np.nan).weight == Difference(np.inf, "b")
