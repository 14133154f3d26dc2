"""Seconds of collectives, by hand."""

import pytest

from switch_tf.aot.program import Collective
from switch_tf.hardware.chips import Chip
from switch_tf.hardware.network import Network

CHIP = Chip(memory=16e9, flops=200e12, memory_bandwidth=800e9, link_bandwidth=50e9, clock=1e9)
# A line of four chips: over the link in its middle each of two sends two thirds of what it has.
NETWORK = Network("v5e:1x4", {"data": 4}, [(0, index, 0) for index in range(4)])


def _seconds(kind, size=3e9):
    return Collective(kind, size, 4, ("data",), "", "").seconds(CHIP, NETWORK)


def test_links_carry_what_a_ring_must_send():
    assert _seconds("all-gather") == pytest.approx(3e9 * 3 / 4 / 50e9)
    assert _seconds("all-reduce") == pytest.approx(2 * 3e9 * 3 / 4 / 50e9)
    assert _seconds("reduce-scatter") == pytest.approx(3 * 3e9 / 50e9)
    assert _seconds("collective-permute") == pytest.approx(3e9 / 50e9)


def test_in_an_all_to_all_each_byte_takes_every_link_on_its_way():
    assert _seconds("all-to-all") == pytest.approx(3e9 * 3 / 4 * 4 / 3 / 50e9)
