import time
import types

import pytest

from switch_tf.training.speed import Meter


def test_speeds_are_over_the_time_that_is_not_paused_and_start_over():
    asked = []
    peak = types.SimpleNamespace(flops=lambda used: asked.append(used) or 1e6)
    meter = Meter(flops_per_step=100.0, peak=peak)
    assert not meter.has_steps
    for _ in range(2):
        meter.add(num_steps=1, num_tokens=30.0, input_wait=0.0)
    with meter.paused():
        time.sleep(0.2)
    speeds = meter.read()
    assert speeds["seconds_per_step"] < 0.05
    assert speeds["tokens_per_second"] == pytest.approx(30.0 / speeds["seconds_per_step"])
    assert asked == [pytest.approx(100.0 / speeds["seconds_per_step"])]
    assert speeds["model_flops_utilization"] == pytest.approx(asked[0] / 1e6)
    assert not meter.has_steps


def test_untimed_steps_are_left_out_unless_there_are_no_others(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(flops_per_step=1.0, peak=types.SimpleNamespace(flops=lambda used: 1.0))

    def step(seconds, is_timed):
        now[0] += seconds
        meter.add(1, 10.0, 0.25 * seconds, is_timed)
        with meter.paused():
            now[0] += 100.0

    step(9.0, is_timed=False)
    step(1.0, is_timed=True)
    step(3.0, is_timed=True)
    now[0] += 50.0  # others' turn
    meter.restart()
    step(9.0, is_timed=False)
    speeds = meter.read()
    assert speeds["seconds_per_step"] == 2.0 and speeds["tokens_per_second"] == 5.0
    assert speeds["input_wait_fraction"] == 0.25 and not meter.has_steps
    step(9.0, is_timed=False)
    assert meter.has_steps and meter.read()["seconds_per_step"] == 9.0
