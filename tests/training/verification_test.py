"""What two outcomes of the same steps differ in."""

import numpy as np
import pytest

from switch_tf.training import verification
from switch_tf.training.verification import Outcome


def _outcome(gradient, weight=1.0):
    gradients = [np.ones(4, np.float32), np.asarray(gradient, np.float32)]
    return Outcome([2.0, 1.0], gradients, [np.full(4, weight, np.float32)] * 2, ["a", "b"])


def test_outcomes_that_are_equal_differ_in_nothing():
    found = verification.compare(_outcome([1.0, 2.0]), _outcome([1.0, 2.0]))
    assert (found.loss.value, found.gradient.value, found.far_entries, found.weight.value) == (0, 0, 0, 0)
    assert found.losses == [(2.0, 2.0), (1.0, 1.0)]


@pytest.mark.parametrize("gradient, far_entries", [
    ([4.0] * 199 + [3.0], 1 / 200), ([3.0] * 200, 1.0), ([4.0] * 198 + [4.00001, 3.0], 1 / 200)])
def test_the_share_of_far_entries_tells_one_hidden_unit_from_a_wrong_layout(gradient, far_entries):
    found = verification.compare(_outcome([4.0] * 200), _outcome(gradient))
    assert found.gradient == (0.25, "b")
    assert found.far_entries == pytest.approx(far_entries)
