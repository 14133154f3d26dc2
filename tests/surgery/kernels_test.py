"""Kernels of experts by hand."""

import numpy as np
import pytest

from switch_tf.surgery import kernels
from switch_tf.surgery.kernels import Changes

NOBODY = [np.array([], int)] * 4


def rng():
    return np.random.default_rng(0)


def stacked(dense, hidden_axis, width, units, spread):
    """The kernels of all experts."""
    generator = rng()
    return np.stack([kernels.expert_kernel(dense, hidden_axis, width, expert, drawn, spread, generator)
                     for expert, drawn in enumerate(units)])


def test_each_expert_is_a_copy_of_the_dense_kernel():
    dense = np.arange(6, dtype="float32").reshape(2, 3)
    made = stacked(dense, 1, 3, NOBODY, 0.0)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, np.stack([dense] * 4))


def test_narrow_experts_take_the_slices_in_turn():
    wi, wo = np.arange(8, dtype="float32").reshape(2, 4), np.arange(8, dtype="float32").reshape(4, 2)
    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]  # hidden units 0 and 1, then 2 and 3
    np.testing.assert_array_equal(stacked(wi, 1, 2, NOBODY, 0.0), [first, second, first, second])
    first, second = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
    np.testing.assert_array_equal(stacked(wo, 0, 2, NOBODY, 0.0), [first, second, first, second])


def test_noise_has_the_spread_and_is_another_for_each_expert():
    dense = (3 * np.random.default_rng(1).standard_normal((50, 60))).astype("float32")
    added = stacked(dense, 1, 60, NOBODY, 0.3) - dense
    np.testing.assert_allclose(added.std(axis=(1, 2)), 0.3, rtol=0.05)
    assert not np.allclose(added[0], added[1], atol=0.01)


def test_a_share_of_the_hidden_units_is_drawn_anew_with_the_old_mean_and_spread():
    dense = (5 + 3 * np.random.default_rng(1).standard_normal((400, 20))).astype("float32")
    generator = rng()
    units = [generator.choice(20, size=5, replace=False) for _ in range(4)]
    assert [len(set(expert_kernel)) for expert_kernel in units] == [5] * 4
    made = stacked(dense, 1, 20, units, 0.0)
    for expert, expert_kernel in zip(made, units, strict=True):
        kept = np.setdiff1d(np.arange(20), expert_kernel)
        np.testing.assert_array_equal(expert[:, kept], dense[:, kept])
        assert not np.isclose(expert[:, expert_kernel], dense[:, expert_kernel]).all(axis=0).any()
        assert expert[:, expert_kernel].mean() == pytest.approx(5, abs=0.3)
        assert expert[:, expert_kernel].std() == pytest.approx(3, abs=0.3)


def test_slices_of_one_copy_share_a_column_of_the_router():
    kernel = kernels.router_kernel(1000, 6, 2, 0.1, rng())
    assert kernel.shape == (1000, 6) and kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel[:, ::2], kernel[:, 1::2])
    assert len(np.unique(kernel[0])) == 3
    deviation = (0.1 / 1000) ** 0.5
    assert np.abs(kernel).max() <= 2 * deviation
    assert kernel.std() == pytest.approx(0.88 * deviation, rel=0.03)  # of a normal truncated at two deviations


@pytest.mark.parametrize(("field", "value", "message"), [
    ("noise", -0.1, "noise must be a number 0 or above, not -0.1."),
    ("reinitialize", 1.0, r"reinitialize must be a number in \[0, 1\), not 1.0."),
    ("gate_scale", 0.0, "gate_scale must be a number above 0, not 0.0."),
    ("gate_scale", float("nan"), "gate_scale must be a number above 0, not nan."),
    ("seed", -1, "seed must be an integer of at least 0, not -1.")])
def test_values_out_of_range_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Changes(**{field: value})
