import pytest

from switch_tf.optim.schedules import RsqrtDecay


def test_the_rate_is_constant_until_the_end_of_the_warmup_and_then_falls_with_the_root_of_the_step():
    schedule = RsqrtDecay(base=2.0, warmup_steps=100)
    # 2 / sqrt(max(step, 100))
    assert [float(schedule(step)) for step in (0, 100, 400)] == pytest.approx([0.2, 0.2, 0.1])


def test_the_schedule_survives_its_config():
    assert RsqrtDecay.from_config(RsqrtDecay(3.0, 7).get_config()).get_config() == {"base": 3.0, "warmup_steps": 7}


@pytest.mark.parametrize("changes, message", [
    ({"warmup_steps": 0}, "warmup_steps must be an integer of at least 1, not 0"),
    ({"warmup_steps": 1e4}, r"warmup_steps must be an integer of at least 1, not 10000\.0"),
    ({"base": -0.1}, r"base must be a number 0 or above, not -0\.1"),
    ({"base": float("nan")}, "base must be a number 0 or above, not nan"),
    ({"base": None}, "base must be a number 0 or above, not None"),
])
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RsqrtDecay(**changes)
