import pytest

from switch_tf.configs import choices


def test_nearest_says_nothing_where_nothing_is_near():
    assert choices.nearest("xyzzy", ["switch_base_8"]) == ""


def test_a_whole_float_is_an_integer_in_a_field_of_an_experiment():
    kept = choices.check("TRAIN_STEPS", 1e6, 1)
    assert (kept, type(kept)) == (10**6, int)
    for value in (1.5, float("inf"), float("nan"), 0.0):
        with pytest.raises(ValueError, match="TRAIN_STEPS must be an integer of at least 1, not "):
            choices.check("TRAIN_STEPS", value, 1)
