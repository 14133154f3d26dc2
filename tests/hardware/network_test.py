"""Links in a torus and what they carry, by hand."""

import collections
import itertools

import numpy as np
import pytest

from switch_tf.hardware.network import Network


def _network(topology, mesh):
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    places = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=-1)
    return Network(topology, mesh, np.pad(places, ((0, 0), (0, 3 - len(sizes)))))


def test_a_ring_has_two_links_and_a_line_one():
    network = _network("v5p:4x4x4", {"data": 16, "model": 4})
    assert network.links_of_rings(("model",)) == 2
    assert network.links_of_rings(("data",)) == 4
    assert network.links_of_rings(("data", "model")) == 6
    # A v5e of less than 16 does not wrap, nor do three dimensions that are not cubes of four.
    network = _network("v5e:2x4", {"data": 2, "model": 4})
    assert [network.links_of_rings(axes) for axes in (("data",), ("model",), ("data", "model"))] == [1, 1, 2]
    assert _network("v4:2x2x4", {"data": 4, "model": 4}).links_of_rings(("model",)) == 1


def test_a_part_of_a_ring_is_a_line_and_groups_that_run_through_each_other_share():
    network = _network("v5e:16x16", {"data": 16, "expert": 2, "model": 8})
    assert network.links_of_rings(("model",)) == 1  # 0 .. 7 of 16
    assert network.links_of_rings(("expert",)) == 2 / 8  # 0 and 8, both ways round: seven other pairs too
    network = _network("v5e:16x16", {"data": 16, "model": 8, "expert": 2})
    assert network.links_of_rings(("expert",)) == 1  # neighbours
    assert network.links_of_rings(("model",)) == 2 / 2  # every second of 16, closed, and as many between them
    assert network.links_to_next(("model",)) == 1 / 2
    assert network.links_to_next(("expert",)) == 1


def test_in_an_exchange_the_link_in_the_middle_of_a_line_is_the_busiest():
    # 0-1-2-3: over the middle each of two chips sends two thirds of what it has.
    network = _network("v5e:2x4", {"model": 2, "data": 4})
    assert network.busiest_link(("data",)) == pytest.approx(2 * 2 / 3)
    # Two by four: over the middle of each of two lines two chips send four sevenths.
    assert network.busiest_link(("model", "data")) == pytest.approx(2 * 4 / 7)
    # A ring of four, as v5p has: to each side a third over one link, and a half of a third over two.
    assert _network("v5p:4x4x4", {"model": 16, "data": 4}).busiest_link(("data",)) == pytest.approx(1 / 3 + 2 / 6)


def test_exchanges_of_every_pair_and_link_one_by_one():
    """Each byte of each pair walks along x, then along y, in groups that share links."""
    network = _network("v5e:16x16", {"a": 4, "b": 2, "c": 4, "d": 8})
    for axes in (("a", "c"), ("b", "d"), ("b",), ("a", "b", "c", "d")):
        loads = collections.Counter()
        groups = network.groups(axes)
        for group in groups:
            for start, end in itertools.permutations(map(tuple, group), 2):
                _walk(loads, start, end, 1 / (len(group) - 1))
        assert network.busiest_link(axes) == pytest.approx(max(loads.values()), rel=1e-6), axes


def _walk(loads, place, end, amount):
    for dimension in (0, 1):
        there = (end[dimension] - place[dimension]) % 16
        for step, hops in ((1, there), (-1, 16 - there)):
            if there == 0 or hops > 8:
                continue
            share = amount / 2 if hops == 8 else amount
            for hop in range(hops):
                at = list(place)
                at[dimension] = (place[dimension] + step * hop) % 16
                loads[(*at, dimension, step)] += share
        place = (end[0], place[1])


def test_one_chip():
    network = _network("v5e:1x1", {"data": 1})
    assert network.busiest_link(("data",)) == network.links_of_rings(("data",)) == 1
