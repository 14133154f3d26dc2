"""What utilisation is measured against; no test depends on how fast this machine is."""

import types

import pytest
import tensorflow as tf

from switch_tf.training import speed
from switch_tf.training.speed import Meter, Peak


@pytest.fixture
def clock(monkeypatch):
    """A time that stands still until a test moves it."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(speed.time, "monotonic", lambda: clock.now)
    return clock


def _measures(monkeypatch, *rates):
    """Has the products run at these rates, one after the other; returns those that are left."""
    left = list(rates)
    monkeypatch.setattr(speed, "measuring", lambda dtype: lambda: left.pop(0))
    return left


def test_the_rate_of_a_known_chip_is_not_measured(monkeypatch):
    monkeypatch.setattr(speed, "nominal_flops", lambda dtype: {"bfloat16": 989.5e12}[dtype])
    _measures(monkeypatch)
    assert Peak("bfloat16", 8).flops(used=1e15) == 8 * 989.5e12


def test_a_tpu_of_an_unknown_type_is_never_measured(monkeypatch):
    monkeypatch.setattr(speed, "nominal_flops", lambda dtype: None)
    monkeypatch.setattr(speed, "device_type", lambda: "TPU")
    _measures(monkeypatch)  # would find no rate
    found = Peak("bfloat16", 8)
    assert found.flops(used=1e15) is None
    clock = speed.Clock()
    meter = Meter(1e9, found, clock)
    with clock.counting("steps"):
        meter.add(1, 10)
    speeds = meter.read()
    assert "tokens_per_second" in speeds and "model_flops_utilization" not in speeds


def test_a_measured_rate_is_the_fastest_and_measured_again_after_a_while(monkeypatch, clock):
    left = _measures(monkeypatch, 10.0, 7.0, 12.0)
    found = Peak("float32", 2)
    assert found.flops(used=3.0) == 20.0 and len(left) == 2
    clock.now += speed.TRUSTED + 1
    assert found.flops(used=3.0) == 20.0 and len(left) == 1  # busy this time
    assert found.flops(used=3.0) == 20.0 and len(left) == 1
    clock.now += speed.TRUSTED + 1
    assert found.flops(used=3.0) == 24.0 and not left


def test_a_run_that_uses_more_than_was_measured_has_it_measured_again(monkeypatch, clock):
    left = _measures(monkeypatch, 10.0, 30.0)
    found = Peak("float32", 1)
    assert found.flops(used=10.0) == 10.0 and len(left) == 1
    assert found.flops(used=20.0) == 30.0 and not left


def test_no_run_uses_more_than_all_of_a_measured_rate(monkeypatch, clock):
    _measures(monkeypatch, 10.0, 11.0)
    found = Peak("float32", 2)
    assert found.flops(used=50.0) == 50.0 and found.flops(used=40.0) == 50.0


def test_products_run_in_one_call_for_about_a_quarter_of_a_second(monkeypatch):
    clock, calls = types.SimpleNamespace(now=0.0), []

    def run(count):
        calls.append(int(count))
        clock.now += 0.02 * int(count)
        return 0.0

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(speed, "compile_products", lambda dtype, size: run)
    # 13 products take 0.26 s, each 2 * 1024^3 FLOPs
    assert speed.measuring("float32")() == pytest.approx(2 * 1024**3 / 0.02)
    assert calls == [1, 1, 13]


def test_every_product_of_a_call_is_computed(monkeypatch):
    fill = tf.fill
    monkeypatch.setattr(tf, "fill", lambda shape, value: fill(shape, 2 * value))
    products = speed.compile_products("float32", 8)
    monkeypatch.undo()
    assert float(products(3)) == 2**3
