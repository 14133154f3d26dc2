"""Collectives are read from XLA's text in each of its ways to write groups; the roofline by hand."""

import pytest

from switch_tf.aot import report
from switch_tf.partitioning.collectives import summarize

MESH = {"data": 4, "model": 2}
LINE = ('  %x.1 = {dtype}[4,2,80,128]{{3,2,1,0}} {kind}(%y), channel_id=1, replica_groups={groups}, '
        'metadata={{op_name="jit(f)/{name}"}}')


def _read(kind="all-to-all", groups="{{0,2,4,6},{1,3,5,7}}", name="switch_transformer/encoder/layers_1/mlp/XlaSharding",
          dtype="bf16"):
    (found,) = report.collectives(LINE.format(kind=kind, groups=groups, name=name, dtype=dtype), MESH)
    return found


@pytest.mark.parametrize("groups, size, axes", [
    ("{{0,2,4,6},{1,3,5,7}}", 4, ("data",)), ("{{0,1},{2,3},{4,5},{6,7}}", 2, ("model",)),
    ("{{0,1,2,3,4,5,6,7}}", 8, ("data", "model")), ("[2,4]<=[4,2]T(1,0)", 4, ("data",)), ("[4,2]<=[8]", 2, ("model",)),
    ("[1,8]<=[8]", 8, ("data", "model")), ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4, ("data",)),
    ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_2'}", 2, ("model",)),
    ("mesh['axis_0'=8] {'axis_0':(1)4}", 4, ("data",)), ("mesh['axis_0'=8] {'axis_0':(4)2}", 2, ("model",)),
    ("{}", 8, ("data", "model"))])
def test_groups_are_mesh_axes(groups, size, axes):
    found = _read(groups=groups)
    assert (found.group_size, found.axes) == (size, axes)


def test_bytes_are_those_of_the_result_on_one_chip():
    assert _read().bytes == 4 * 2 * 80 * 128 * 2
    assert _read(dtype="f32").bytes == 4 * 2 * 80 * 128 * 4
    line = ("  %a = (bf16[1,8]{1,0}, bf16[4,8]{1,0}) all-gather-start(%b), replica_groups={{0,2,4,6},{1,3,5,7}}\n"
            "  %c = (f32[3]{0}, f32[5]{0}) all-reduce(%d, %e), replica_groups={{0,1},{2,3},{4,5},{6,7}}\n"
            "  %f = f32[3]{0} add(%g, %h)")
    assert [(one.kind, one.bytes) for one in report.collectives(line, MESH)] == [("all-gather", 64), ("all-reduce", 32)]


@pytest.mark.parametrize("name, where", [
    ("switch_transformer_1/encoder_1/layers_1_1/mlp_1/XlaSharding_5", "encoder/layers_1/mlp"),
    ("gradient_tape/switch_transformer/decoder/layers_0/mlp/einsum", "gradient of decoder/layers_0/mlp"),
    ("adafactor/mul", "losses and update")])
def test_a_collective_says_which_layer_it_comes_from(name, where):
    assert _read(name=name).where == where


def test_links_carry_what_a_ring_must_send():
    size = 4 * 2 * 80 * 128 * 2
    assert report.link_bytes([_read()]) == size * 3 / 4
    assert report.link_bytes([_read("all-reduce")]) == 2 * size * 3 / 4
    assert report.link_bytes([_read("reduce-scatter")]) == 3 * size
    assert summarize([_read(), _read(), _read("all-reduce")]) == {
        "all-to-all": {"count": 2, "bytes": 2 * size}, "all-reduce": {"count": 1, "bytes": size}}


def test_a_roofline_is_the_slowest_part_or_the_sum():
    chip = report.Chip(memory=16e9, flops=200e12, memory_bandwidth=800e9, link_bandwidth=100e9)
    found = report.roofline(flops=2e12, bytes_accessed=4e9, sent_bytes=0.3e9, chip=chip)
    assert found == pytest.approx((0.01, 0.005, 0.003))
    assert (found.at_best, found.in_turn) == pytest.approx((0.01, 0.013))
