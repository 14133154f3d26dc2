import dataclasses
import fractions

import numpy as np
import pytest
import tensorflow as tf

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
@pytest.mark.parametrize("rule", ["in [0, 1)", "in (0, 1)", "in [1e-6, 1e6]", "above 0", "0 or above"])
def test_what_is_no_finite_number_is_refused_by_every_rule(value, rule):
    with pytest.raises(ValueError) as raised:
        checks.number("rate", value, rule)
    assert str(raised.value) == f"rate must be a number {rule}, not {value!r}."


@pytest.mark.parametrize("rule, allowed, refused", [
    ("in [1e-6, 1e6]", (1e-6, 1, 1e6), (0, -1, 9e-7, 2e6)),
    ("in [0, 1)", (0, 0.999), (-1e-9, 1)), ("in (0, 1)", (1e-9, 0.999), (0, 1.0)),
    ("above 0", (1e-30, 7), (0, -0.1)), ("0 or above", (0, 7.5), (-1e-30, -1))])
def test_rules_hold_up_to_their_ends(rule, allowed, refused):
    assert [checks.number("rate", value, rule) for value in allowed] == list(allowed)
    for value in refused:
        with pytest.raises(ValueError):
            checks.number("rate", value, rule)


@pytest.mark.parametrize("value", [1e-300, 1e300, 10**400])
def test_numbers_beyond_float32_are_refused_as_they_would_become_0_or_infinite(value):
    with pytest.raises(ValueError, match=r"must be a number that float32 can hold, from 1.2e-38 to 3.4e\+38, not 1"):
        checks.number("scale", value, "above 0")
    assert checks.number("scale", 2e-38, "above 0") == 2e-38


def test_fractions_are_numbers_as_far_as_a_float_holds_them():
    assert checks.number("rate", fractions.Fraction(1, 4), "above 0") == 0.25
    with pytest.raises(ValueError, match="rate must be a number above 0, not Fraction"):
        checks.number("rate", fractions.Fraction(10**400), "above 0")


def test_integers_too_large_for_a_tensors_sizes_are_refused():
    assert checks.integer("size", 2**31 - 1, 1) == 2**31 - 1
    with pytest.raises(ValueError, match="^size must be an integer of at most 2147483647, not 2147483648.$"):
        checks.integer("size", 2**31, 1)


def test_a_sentence_shows_a_long_value_in_one_short_line():
    with pytest.raises(ValueError) as raised:
        checks.integer("size", np.zeros((20, 20)), 1)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_only_true_and_false_are_flags():
    for value in (True, np.True_, False, np.False_):
        assert checks.flag("remat", value) is bool(value)
    for value in ("no", "True", 0, 1, None, np.int64(1), np.array([True])):
        with pytest.raises(ValueError) as raised:
            checks.flag("remat", value)
        assert str(raised.value) == f"remat must be True or False, not {value!r}."


def test_text_is_text_and_what_is_optional_may_be_none():
    assert checks.text("name", "c4") == "c4"
    for value in ("", None, 3, b"c4"):
        with pytest.raises(ValueError, match="^name must be text that is not empty, not "):
            checks.text("name", value)
    assert checks.optional("width", None, checks.integer, 1) is None
    assert checks.optional("width", np.int64(2), checks.integer, 1) == 2


def test_tensors_are_told_by_kind_and_shape():
    checks.tensor("mask", np.ones((2, 3), bool), "bool", (None, 3))
    checks.tensor("x", tf.keras.Input((3,)), "float", (2, 3))  # whose first dimension is not known yet
    checks.tensor("bias", np.ones((1, 3), "float16"), "float", (2, 3), may_broadcast=True)
    for kind, shape in (("int", (2, 3)), ("bool", (3, 3)), ("bool", (2, 3, 1)), ("bool", ())):
        with pytest.raises(ValueError, match=r"^mask must be <\w+>\[.*\], not <bool>\[2, 3\]\.$"):
            checks.tensor("mask", np.ones((2, 3), bool), kind, shape)


def test_sizes_may_be_scalar_tensors():
    assert checks.size("length", np.int32(3), 1) == 3
    scalar = tf.constant(3)
    assert checks.size("length", scalar, 1) is scalar
    for wrong in (tf.constant(3.0), tf.constant([3]), 0, 3.0, None):
        with pytest.raises(ValueError, match="^length must be "):
            checks.size("length", wrong, 1)


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


@pytest.mark.parametrize(("text", "shown"), [
    ("eval/größe/f1 $x$", "eval/größe/f1 $x$"), ("a\nb\tc\x1b[0m", r"a\nb\tc\x1b[0m"),
    ("\u202ex\ud800", r"\u202ex\ud800")])
def test_what_a_terminal_would_obey_is_written_out(text, shown):
    assert checks.printable(text) == shown
