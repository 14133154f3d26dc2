"""Shallow depths, what follows from them, and advice."""

import dataclasses
import re
import time

import pytest

from switch_tf import SwitchConfig
from switch_tf.aot import estimate
from switch_tf.aot.lower import Argument, Lowered
from switch_tf.aot.program import Roofline
from switch_tf.partitioning.layout import Layout


@pytest.mark.parametrize("preset, depths", [
    ("switch_base_8", [(2, 2), (4, 4)]), ("switch_c_2048", [(2, 2), (4, 4)]), ("t5_base", [(2, 2), (4, 4)]),
    ("switch_tiny", [(2, 2)])])
def test_whole_periods_of_at_least_four_layers_are_compiled(preset, depths):
    assert estimate.shallow_depths(SwitchConfig.from_preset(preset)) == depths


def test_an_encoder_alone_and_unequal_stacks():
    config = SwitchConfig.from_preset("switch_base_8")
    assert estimate.shallow_depths(dataclasses.replace(config, num_decoder_layers=0)) == [(4, 0), (8, 0)]
    dense = dataclasses.replace(config, num_experts=0, num_decoder_layers=0)
    assert estimate.shallow_depths(dense) == [(4, 0), (8, 0)]
    assert estimate.shallow_depths(dataclasses.replace(dense, num_encoder_layers=9)) == [(4, 0), (8, 0)]
    # 6 periods of one stack and 2 of the other cannot be extended together.
    unequal = dataclasses.replace(config, num_decoder_layers=4)
    assert estimate.shallow_depths(unequal) == [(12, 4)]


def test_what_takes_long_says_that_it_goes_on(monkeypatch):
    lines = []
    monkeypatch.setattr(estimate, "REPORT_PERIOD", 0.01)
    monkeypatch.setattr(estimate, "say", lines.append)
    with estimate._progress(42):
        while len(lines) < 2:
            time.sleep(0.01)
    assert all(re.fullmatch(r"\.\.\. \d+ s of about 42 \.\.\.", line) for line in lines)


def _point(layers):
    """A compiled program with numbers linear in its depth."""
    memory = dict.fromkeys(("arguments", "outputs", "aliased", "temporaries", "code", "weights", "slots", "gradients"),
                           100 + 10 * layers)
    return estimate.Estimate(
        memory, 500 + layers, [(layers, layers)], {}, None, {"all-to-all": {"count": 4 * layers, "bytes": 28 * layers}},
        1000.0 * layers + 5, Roofline(2.0 * layers, 50.0 * layers, 1.0),
        {"attention": 3.0 * layers, "optimizer": 7.0 - layers})


def test_bytes_are_of_the_pieces_of_one_chip_or_of_all():
    layout = Layout("data=4", (("batch", "data"),))
    weight = Argument("a", "weight", (8, 5), "float32", (("data",), ()))  # 2 * 5 numbers a chip
    slots = [Argument(name, "slot", (3,), "bfloat16", ((),)) for name in "bc"]
    lowered = Lowered(None, [weight._replace(kind="feature"), weight, *slots], layout)
    assert [estimate._bytes(lowered, kind, layout.piece) for kind in ("weight", "slot")] == [40, 12]
    assert estimate._bytes(lowered, "weight", lambda shape, spec: shape) == 160


def test_numbers_are_extended_linearly():
    config = SwitchConfig.from_preset("switch_base_8")  # 12 + 12 layers
    answer = estimate._extrapolated(config, [_point(2), _point(4)])
    assert answer.memory["temporaries"] == 220
    assert answer.collectives == {"all-to-all": {"count": 48, "bytes": 48 * 7}}
    assert answer.flops == 12005
    assert answer.roofline == (24.0, 600.0, 1.0)
    assert answer.parts == {"attention": 36.0, "optimizer": 3.0}  # what shrinks with depth is not extrapolated below it
    assert answer.state == 512 and answer.compiled == [(2, 2), (4, 4)]
    between = estimate._extrapolated(dataclasses.replace(config, num_encoder_layers=7, num_decoder_layers=0),
                                     [_point(2), _point(4)])
    assert between.memory["temporaries"] == 170  # three and a half times two layers
    whole = estimate._extrapolated(config, [_point(12)])
    assert (whole.flops, whole.memory, whole.collectives) == (answer.flops, answer.memory, answer.collectives)
    assert whole.parts == {"attention": 36.0, "optimizer": -5.0}
