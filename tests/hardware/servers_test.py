"""Servers of GPUs: names, memory, and what groups can send, by hand."""

import numpy as np
import pytest

from switch_tf.aot.program import Collective
from switch_tf.hardware import chips
from switch_tf.hardware.chips import GPUS, SHARE_VARIABLES
from switch_tf.hardware.network import Servers
from switch_tf.refusals import Refusal


@pytest.mark.parametrize("topology, expected", [
    ("h100:8", (1, 8)), ("h100:1", (1, 1)), ("a100:2x8", (2, 8)), ("h200:16x4", (16, 4))])
def test_a_topology_names_servers_and_gpus(topology, expected):
    assert chips.kind(topology) == "GPU"
    assert chips.servers(topology) == (GPUS[topology[:4]], *expected)


@pytest.mark.parametrize("name, topology", {
    "v5litepod-1": "v5e:1x1", "v5litepod-8": "v5e:2x4", "v5e-256": "v5e:16x16", "v6e-16": "v6e:4x4",
    "v4-8": "v4:2x2x1", "v4-64": "v4:2x4x4", "v5p-16": "v5p:2x2x2", "v5p-2048": "v5p:8x8x16",
    "a100-80gb": "a100:1", "a100-80gb:2x8": "a100:2x8", "h200-141gb:8": "h200:8", "h100": "h100:1",
    "ironwood:2x2x1": "tpu7x:2x2x1", "v5e:4x4": "v5e:4x4",
    "v5litepod-12": "v5litepod-12", "v4-0": "v4-0", "a100-40gb": "a100-40gb", "h100-141gb": "h100-141gb"}.items())
def test_clouds_and_makers_names_have_a_topology(name, topology):
    assert chips.full_name(name) == topology


@pytest.mark.parametrize("topology", [
    "h100", "h100:0", "h100:16", "h100:0x8", "h100:8x", "t4:8", "h100:2x2x2", "8", ""])
def test_other_names_are_refused(topology):
    with pytest.raises(Refusal, match=rf"of GPUs like h100:8 .*a100, h100, h200.*, not '{topology}'"):
        chips.kind(topology)


def test_a_pod_is_none_of_gpus():
    assert chips.kind("v5e:2x4") == "TPU"
    assert chips.find_chip("v5e:2x4").clock == pytest.approx(1.5e9, rel=0.01)


def test_a_program_has_the_share_of_memory_that_jax_takes(monkeypatch):
    for variable in SHARE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert chips.find_chip("h100:8").memory == 0.75 * 84_942_979_072
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    assert chips.find_chip("h100:8").memory == 0.95 * 84_942_979_072
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "95%")
    with pytest.raises(Refusal, match="XLA_CLIENT_MEM_FRACTION is .* a number up to 1 such as 0.9, not '95%'"):
        chips.find_chip("h100:8")


def test_float32_products_take_twice_as_long():
    chip = chips.find_chip("h100:8")
    assert chip.flops == 989.5e12 and chip.float32_flops == pytest.approx(989.5e12 / 2, rel=0.01)


# Two servers of four GPUs: 450 GB/s within, 50 GB/s between them.
H100 = GPUS["h100"]


def _seconds(kind, mesh, axes, servers=(0, 0, 0, 0, 1, 1, 1, 1)):
    size = int(np.prod([mesh[axis] for axis in axes]))
    network = Servers(H100, mesh, servers[:int(np.prod(list(mesh.values())))])
    return Collective(kind, 9e9, size, axes, "", "").seconds(chips.find_chip("h100:8"), network)


@pytest.mark.parametrize("kind, expected", [
    ("all-gather", 9e9 * 3 / 4), ("all-reduce", 9e9 * 2 * 3 / 4), ("reduce-scatter", 9e9 * 3),
    ("collective-permute", 9e9), ("all-to-all", 9e9 * 3 / 4)])
def test_within_a_server_all_of_nvlink_carries_what_a_gpu_sends(kind, expected):
    assert _seconds(kind, {"data": 4}, ("data",)) == pytest.approx(expected / 450e9)
    # The other axis crosses between the servers, and this one still does not.
    assert _seconds(kind, {"data": 2, "expert": 4}, ("expert",)) == pytest.approx(expected / 450e9)


def test_groups_of_one_gpu_in_each_server_send_over_its_card():
    mesh = {"data": 2, "expert": 4}
    assert _seconds("all-gather", mesh, ("data",)) == pytest.approx(9e9 / 2 / 50e9)
    assert _seconds("collective-permute", mesh, ("data",)) == pytest.approx(9e9 / 50e9)
    assert _seconds("all-to-all", mesh, ("data",)) == pytest.approx(9e9 / 2 / 50e9)


def test_a_group_of_whole_servers_sums_over_all_their_cards():
    # 2 x 7/8 of the bytes go around each of four rings, a quarter of them over each card.
    assert _seconds("all-reduce", {"data": 8}, ("data",)) == pytest.approx(9e9 * 2 * 7 / 8 / (4 * 50e9))
    # Four sevenths of what an all-to-all sends are for the other server.
    assert _seconds("all-to-all", {"data": 8}, ("data",)) == pytest.approx(9e9 * 7 / 8 * 4 / 7 / 50e9)
