import keras
import pytest

from switch_tf.optim.schedules import Cooldown, RsqrtDecay


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


def test_the_rate_falls_in_a_straight_line_to_nothing_over_the_last_share_of_the_steps():
    schedule = Cooldown(RsqrtDecay(2.0, warmup_steps=100), last_step=500, share=0.2)
    # 2 / 20 at step 400, where the line begins; 2 / sqrt(450) x 50 / 100; nothing at the end and after it
    assert [float(schedule(step)) for step in (0, 400, 450, 500, 600)] == pytest.approx(
        [0.2, 0.1, 1 / 450 ** 0.5, 0.0, 0.0])
    assert float(Cooldown(0.5, last_step=10, share=1)(5)) == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", [0.5, RsqrtDecay(3.0, 7)], ids=["rate", "schedule"])
def test_a_cooldown_survives_being_saved(schedule):
    saved = keras.saving.serialize_keras_object(Cooldown(schedule, 100, 0.5))
    loaded = keras.saving.deserialize_keras_object(saved)
    assert float(loaded(60)) == float(Cooldown(schedule, 100, 0.5)(60)) > 0


@pytest.mark.parametrize("changes, message", [
    ({"share": 0}, r"share must be a number in \(0, 1\], not 0"),
    ({"share": 1.5}, r"share must be a number in \(0, 1\], not 1\.5"),
    ({"last_step": 0}, "last_step must be an integer of at least 1, not 0"),
    ({"schedule": -1}, "schedule must be a number 0 or above, not -1")])
def test_an_impossible_cooldown_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Cooldown(**{"schedule": 0.1, "last_step": 10, **changes})
