import time
import types

import pytest

from switch_tf.training.meter import Meter


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
