import dataclasses

import numpy as np
import pytest

from switch_tf import checks


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), np.arange(4)[3]])
def test_integers_of_numpy_are_as_good_as_pythons_and_become_those(value):
    kept = checks.integer("size", value, at_least=3)
    assert (kept, type(kept)) == (3, int)


@pytest.mark.parametrize("value", [2, -3, 3.0, np.float64(3), True, np.True_, None, "3", np.array([3]), float("nan")])
def test_other_values_are_no_integers_of_at_least_3(value):
    with pytest.raises(ValueError) as raised:
        checks.integer("size", value, at_least=3)
    assert str(raised.value) == f"size must be an integer of at least 3, not {value!r}."


@pytest.mark.parametrize("value, kept", [(0, 0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(0), 0)])
def test_numbers_of_numpy_are_as_good_as_pythons_and_become_those(value, kept):
    found = checks.number("rate", value, "in [0, 1)")
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize("value", [True, False, np.True_, None, "0.5", [0.5], np.array([0.5]), 0.5j,
                                   float("nan"), float("inf"), float("-inf"), np.float32("nan")])
@pytest.mark.parametrize("rule", ["in [0, 1)", "in (0, 1)", "above 0", "0 or above"])
def test_what_is_no_finite_number_is_refused_by_every_rule(value, rule):
    with pytest.raises(ValueError) as raised:
        checks.number("rate", value, rule)
    assert str(raised.value) == f"rate must be a number {rule}, not {value!r}."


@pytest.mark.parametrize("rule, allowed, refused", [
    ("in [0, 1)", (0, 0.999), (-1e-9, 1)), ("in (0, 1)", (1e-9, 0.999), (0, 1.0)),
    ("above 0", (1e-30, 7), (0, -0.1)), ("0 or above", (0, 7.5), (-1e-30, -1))])
def test_rules_hold_up_to_their_ends(rule, allowed, refused):
    assert [checks.number("rate", value, rule) for value in allowed] == list(allowed)
    for value in refused:
        with pytest.raises(ValueError):
            checks.number("rate", value, rule)


def test_only_true_and_false_are_flags():
    assert checks.flag("remat", True) is True
    assert checks.flag("remat", False) is False
    for value in ("no", "True", 0, 1, None):
        with pytest.raises(ValueError) as raised:
            checks.flag("remat", value)
        assert str(raised.value) == f"remat must be True or False, not {value!r}."


def test_fields_of_a_frozen_dataclass_are_checked_and_become_pythons_own():
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        width: int
        depth: int

        def __post_init__(self):
            checks.fields(self, ("width", "depth"), checks.integer, 1)

    sizes = Sizes(np.int64(4), 2)
    assert (sizes, type(sizes.width)) == (Sizes(4, 2), int)
    with pytest.raises(ValueError, match="depth must be an integer of at least 1, not 0"):
        dataclasses.replace(sizes, depth=0)
