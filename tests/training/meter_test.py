import itertools
import subprocess
import sys
import time
import types

import pytest

from switch_tf.training import speed
from switch_tf.training.speed import Clock, Meter


@pytest.fixture
def wait(monkeypatch):
    """A function that lets seconds pass."""
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_no_moment_falls_between_two_causes(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(ticks))  # each look takes a second
    clock = Clock()
    clock.enter("start/first_step")
    assert clock.take("steps") == {"seconds/start/first_step": 1}
    assert clock.take() == {"seconds/steps": 1}


def test_each_moment_has_one_cause_and_a_run_that_waits_for_others_has_none(wait):
    clock = Clock(age=5.0)
    wait(100)  # nothing counts yet
    clock.enter("start/build")
    wait(1)
    with clock.counting("start/data"):
        wait(2)
        with clock.counting("start/restore"):
            wait(4)
        wait(8)
    wait(16)
    assert clock.take() == {"seconds/start/import": 5.0, "seconds/start/build": 17.0, "seconds/start/data": 10.0,
                            "seconds/start/restore": 4.0}
    clock.enter(None)
    wait(100)
    with pytest.raises(OSError), clock.counting("save"):
        wait(0.25)
        raise OSError
    wait(100)
    assert clock.take() == {"seconds/save": 0.25}
    assert clock.take() == {}
    assert clock.read()["start/build"] == 17.0


def test_the_age_of_a_process_includes_what_came_before_python_code():
    script = "from switch_tf import environment; import time; time.sleep(0.2); print(environment.process_age())"
    started = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", script]))
    assert 0.2 < age < time.monotonic() - started + 0.02


def test_speeds_are_over_the_time_of_steps_and_input_and_start_over(wait):
    asked = []
    peak = types.SimpleNamespace(flops=lambda used: asked.append(used) or 1e6)
    clock = Clock(age=100.0)
    meter = Meter(flops_per_step=100.0, peak=peak, clock=clock)
    assert not meter.has_steps
    for seconds, cause in ((1.0, "start/first_step"), (2.0, "steps")):
        with clock.counting(cause):
            wait(seconds)
            with clock.counting("input"):
                wait(0.5)
            meter.add(num_steps=1, num_tokens=30.0)
        with clock.counting("save"):
            wait(100)
    assert meter.read() == {"seconds_per_step": 2.0, "tokens_per_second": 15.0, "input_wait_fraction": 0.25,
                            "model_flops_utilization": 50.0 / 1e6}
    assert asked == [50.0] and not meter.has_steps


def test_untimed_steps_are_left_out_unless_there_are_no_others(wait):
    clock = Clock()
    meter = Meter(flops_per_step=1.0, peak=types.SimpleNamespace(flops=lambda used: 1.0), clock=clock)

    def step(seconds, is_timed):
        wait(50)  # the turn of another run
        with clock.counting("steps"):
            wait(seconds)
            meter.add(1, 10.0, is_timed)

    step(9.0, is_timed=False)
    step(1.0, is_timed=True)
    step(3.0, is_timed=True)
    step(9.0, is_timed=False)
    speeds = meter.read()
    assert speeds["seconds_per_step"] == 2.0 and speeds["tokens_per_second"] == 5.0 and not meter.has_steps
    step(9.0, is_timed=False)
    assert meter.has_steps and meter.read()["seconds_per_step"] == 9.0
