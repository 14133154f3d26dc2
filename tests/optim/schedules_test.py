import pytest

from switch_tf.optim.schedules import RsqrtDecay


def test_the_rate_is_constant_until_the_end_of_the_warmup_and_then_falls_with_the_root_of_the_step():
    schedule = RsqrtDecay(base=2.0, warmup_steps=100)
    # 2 / sqrt(max(step, 100))
    assert [float(schedule(step)) for step in (0, 100, 400)] == pytest.approx([0.2, 0.2, 0.1])


def test_the_schedule_survives_its_config():
    assert RsqrtDecay.from_config(RsqrtDecay(3.0, 7).get_config()).get_config() == {"base": 3.0, "warmup_steps": 7}


def test_a_warmup_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, not 0"):
        RsqrtDecay(warmup_steps=0)
