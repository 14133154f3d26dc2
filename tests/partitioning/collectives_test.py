"""Collectives are read from the text of a program that DTensor has cut."""

import os

import pytest

from switch_tf.partitioning import collectives
from switch_tf.partitioning.collectives import DTENSOR_STAGE, Collective

DEVICES = ",".join(f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(8))
MESH = f"|data=8|0,1,2,3,4,5,6,7|0,1,2,3,4,5,6,7|{DEVICES}"


def relayout(name, before, after, result, dtype="f32"):
    """A line of a dump for an operation that goes from one split to another, "data,unsharded", to shape `result`."""
    return (f'      %2 = "tf.{name}"(%1) <{{input_layout = #dtensor.layout<sharding_specs:{before}, mesh:{MESH}>, '
            f"output_layout = #dtensor.layout<sharding_specs:{after}, mesh:{MESH}>}}> "
            f'{{_layout = ["sharding_specs:{after}, mesh:{MESH}"]}} : (tensor<3x3x{dtype}>) '
            f"-> tensor<{result}{dtype}> loc(#loc7)")


def all_reduce(result, dtype="f32"):
    return (f'      %34 = "tf.DTensorAllReduce"(%33, %cst_56) <{{device_type = "/job:localhost/replica:0/task:0/device:'
            f'CPU", reduce_op = "Add"}}> {{_layout = ["sharding_specs: mesh:{MESH}"]}} : (tensor<{result}{dtype}>, '
            f"tensor<1x8xi32>) -> tensor<{result}{dtype}> loc(#loc9)")


@pytest.fixture
def dump(tmp_path):
    """Writes lines as the program of a traced function, as old as told."""
    def write(*lines, function="computed", number=21391, seconds=0, stage=DTENSOR_STAGE):
        path = tmp_path / f"dtensor.{number % 10000:04}.dtensor_mlir.after_{stage}.__inference_{function}_{number}.mlir"
        path.write_text("\n".join(["module {", "  func.func @main() {", *lines, "  }", "}"]))
        os.utime(path, (1_700_000_000 + seconds,) * 2)
        return tmp_path

    return write


def test_an_all_to_all_has_the_bytes_of_its_result(dump):
    folder = dump(relayout("DTensorAllToAll", "unsharded,data,unsharded,unsharded",
                           "data,unsharded,unsharded,unsharded", "1x8x5x16x"))
    (found,) = collectives.read(folder, "computed")
    assert found == Collective("all-to-all", 1 * 8 * 5 * 16 * 4, False)


def test_an_all_reduce_has_no_layouts(dump):
    scalar, matrix = collectives.read(dump(all_reduce(""), all_reduce("16x32x", "bf16")), "computed")
    assert scalar == Collective("all-reduce", 4, False)
    assert matrix == Collective("all-reduce", 16 * 32 * 2, False)


def test_a_text_that_is_not_understood_is_not_left_out(dump):
    with pytest.raises(AttributeError):
        collectives.read(dump(all_reduce("*x")), "computed")


def test_gathers_and_reduce_scatters_are_read_and_local_operations_are_not(dump):
    folder = dump(relayout("DTensorAllGather", "data", "unsharded", "256x", "i32"),
                  relayout("DTensorReduceScatter", "unsharded,unsharded", "unsharded,data", "8x4x"),
                  relayout("DTensorAllScatter", "unsharded", "data", "32x"),
                  '      %5 = "tf.AddV2"(%3, %4) : (tensor<f32>, tensor<f32>) -> tensor<f32>')
    assert collectives.read(folder, "computed") == [
        Collective("all-gather", 256 * 4), Collective("reduce-scatter", 8 * 4 * 4)]


@pytest.mark.parametrize(("dtype", "size"), [("i1", 1), ("f16", 2), ("bf16", 2), ("f32", 4), ("i32", 4), ("ui32", 4),
                                             ("i64", 8), ("f64", 8)])
def test_bytes_follow_the_dtype(dump, dtype, size):
    (found,) = collectives.read(dump(all_reduce("3x5x", dtype)), "computed")
    assert found.bytes == 15 * size


@pytest.mark.parametrize(("name", "before", "after", "result", "is_unsafe"), [
    ("DTensorAllToAll", "unsharded,data,unsharded,unsharded", "unsharded,unsharded,data,unsharded", "2x8x1x4x", True),
    ("DTensorAllToAll", "unsharded,unsharded,unsharded,data", "unsharded,data,unsharded,unsharded", "2x1x3x8x", True),
    ("DTensorAllToAll", "data,unsharded,unsharded,unsharded", "unsharded,unsharded,data,unsharded", "8x2x1x4x", False),
    ("DTensorAllToAll", "unsharded,unsharded,data,unsharded", "data,unsharded,unsharded,unsharded", "1x2x8x4x", False),
    ("DTensorAllToAll", "unsharded,unsharded,data,unsharded", "unsharded,unsharded,unsharded,data", "2x3x8x1x", True),
    ("DTensorAllToAll", "data,unsharded,unsharded,unsharded", "unsharded,data,unsharded,unsharded", "8x1x2x4x", False),
    ("DTensorAllToAll", "unsharded,data,unsharded", "unsharded,unsharded,data", "2x8x1x", False),
    # The first dimension is split too, but by an axis of its own, and does not move.
    ("DTensorAllToAll", "data,model,unsharded,unsharded", "data,unsharded,model,unsharded", "2x8x1x4x", True),
    ("DTensorAllGather", "unsharded,data,unsharded,unsharded", "unsharded,unsharded,unsharded,unsharded", "2x8x3x4x",
     False)])
def test_all_to_alls_of_four_dimensions_are_unsafe_without_the_first(dump, name, before, after, result, is_unsafe):
    (found,) = collectives.read(dump(relayout(name, before, after, result)), "computed")
    assert found.is_unsafe is is_unsafe


def test_the_newest_program_of_the_function_is_read(dump):
    dump(all_reduce("1x"), all_reduce("2x"), number=21391, seconds=1)
    dump(all_reduce("3x"), number=5, seconds=2)
    dump(all_reduce("4x"), function="applied", number=30000, seconds=3)
    folder = dump(all_reduce("5x"), number=40000, seconds=4, stage="DTensorAllReduceLowering")
    assert [one.bytes for one in collectives.read(folder, "computed")] == [3 * 4]
    assert [one.bytes for one in collectives.read(folder, "applied")] == [4 * 4]


def test_a_function_without_a_program_has_no_collectives(dump, tmp_path):
    assert collectives.read(tmp_path, "computed") == []
    assert collectives.read(dump(all_reduce("1x"), function="applied"), "computed") == []
    assert collectives.read(dump(), "computed") == []


def test_a_summary_counts_and_adds_up_each_kind():
    assert collectives.summarize([]) == {}
    sent = [Collective("all-reduce", 4), Collective("all-to-all", 12), Collective("all-reduce", 40)]
    assert collectives.summarize(sent) == {"all-reduce": {"count": 2, "bytes": 44},
                                           "all-to-all": {"count": 1, "bytes": 12}}


def test_collectives_of_xla_are_counted_with_all_that_they_move():
    text = """
  %a = f32[4,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}
  %b = (f32[1,8]{1,0}, bf16[2,3]{1,0}) all-to-all(%x, %y), channel_id=2
  %c = (s32[], pred[5]{0}) all-gather-start(%x, %y)
  %d = pred[5]{0} all-gather-done(%c)
  %e = f32[2]{0} fusion(%all-reduce.3), calls=%all-reduce
"""
    assert collectives.read_xla(text) == [("all-reduce", 4 * 64, False), ("all-to-all", 4 * 8 + 2 * 6, False),
                                          ("all-gather", 4 + 5, False)]
    assert collectives.summarize(collectives.read_xla(text))["all-to-all"] == {"count": 1, "bytes": 44}
