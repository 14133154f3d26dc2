"""Distances and links in a torus, by hand."""

import numpy as np
import pytest

from switch_tf.aot.network import Network


def _network(topology, mesh, order=None):
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    places = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=-1)
    return Network.of(topology, mesh, np.pad(places, ((0, 0), (0, 3 - len(sizes)))))


def test_neighbours_are_one_link_apart():
    network = _network("v5e:2x4", {"data": 4, "model": 2})
    assert network.mean_hops(("model",)) == 1


def test_in_a_line_of_four_pairs_are_five_thirds_apart():
    # 0-1-2-3: three pairs at 1, two at 2, one at 3.
    network = _network("v5e:2x4", {"model": 2, "data": 4})
    assert network.mean_hops(("data",)) == pytest.approx((3 * 1 + 2 * 2 + 1 * 3) / 6)
    # A ring of four, as v5p has: 1, 2, 1 from each.
    assert _network("v5p:4x4x4", {"model": 16, "data": 4}).mean_hops(("data",)) == pytest.approx(4 / 3)


def test_a_whole_pod_wraps():
    # From each chip of 16 x 16: 8 x 8 / 16 = 4 along each dimension on average, itself included, so 8 * 256 / 255.
    assert _network("v5e:16x16", {"data": 256}).mean_hops(("data",)) == pytest.approx(8 * 256 / 255)


def test_a_group_uses_the_links_along_its_dimensions():
    network = _network("v5p:4x4x4", {"data": 16, "model": 4})
    assert network.share_of_links(("model",)) == pytest.approx(1 / 3)
    assert network.share_of_links(("data",)) == pytest.approx(2 / 3)
    assert network.share_of_links(("data", "model")) == 1


def test_one_chip():
    network = _network("v5e:1x1", {"data": 1})
    assert network.mean_hops(("data",)) == 1
    assert network.share_of_links(("data",)) == 1 / 2
