"""Collectives, memory traffic and the experts' products are read from XLA's text, in each of its ways to write them."""

import pytest

from switch_tf.aot import hlo
from switch_tf.aot.program import Collective, Program, read_collectives
from switch_tf.hardware.chips import Chip
from switch_tf.hardware.network import Network
from switch_tf.partitioning.collectives import summarize

MESH = {"data": 4, "model": 2}
LINE = ('  %x.1 = {dtype}[4,2,80,128]{{3,2,1,0}} {kind}(%y), channel_id=1, replica_groups={groups}, '
        'metadata={{op_name="jit(f)/{name}"}}')


def _program(*lines, before=""):
    return Program(before + "\nENTRY %main.1 (p: f32[8]) -> f32[8] {\n" + "\n".join(lines) + "\n}\n", MESH)


def _read(kind="all-to-all", groups="{{0,2,4,6},{1,3,5,7}}", name="switch_transformer/encoder/layers_1/mlp/XlaSharding",
          dtype="bf16"):
    (found,) = _program(LINE.format(kind=kind, groups=groups, name=name, dtype=dtype)).collectives
    return found


@pytest.mark.parametrize("groups, size, axes", [
    ("{{0,2,4,6},{1,3,5,7}}", 4, ("data",)), ("{{0,1},{2,3},{4,5},{6,7}}", 2, ("model",)),
    ("{{0,1,2,3,4,5,6,7}}", 8, ("data", "model")), ("[2,4]<=[4,2]T(1,0)", 4, ("data",)), ("[4,2]<=[8]", 2, ("model",)),
    ("[1,8]<=[8]", 8, ("data", "model")), ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4, ("data",)),
    ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_2'}", 2, ("model",)),
    ("mesh['axis_0'=8] {'axis_0':(1)4}", 4, ("data",)), ("mesh['axis_0'=8] {'axis_0':(4)2}", 2, ("model",)),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", 4, ("data",)),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", 2, ("model",)),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([8]) {'axis_0'}", 2, ("data",)),
    ("mesh['axis_0'=4,'axis_1'=2], device_ids=(0,2,1,3,4,6,5,7) {'axis_1'}", 2, ("data",)),
    ("{}", 8, ("data", "model"))])
def test_groups_are_mesh_axes(groups, size, axes):
    found = _read(groups=groups)
    assert (found.group_size, found.axes) == (size, axes)


def test_groups_in_words_that_nobody_knows_are_no_guess():
    with pytest.raises(ValueError, match="replica_groups=around_the_corner"):
        _read(groups="around_the_corner")


def test_bytes_are_those_of_the_result_on_one_chip():
    assert _read().bytes == 4 * 2 * 80 * 128 * 2
    assert _read(dtype="f32").bytes == 4 * 2 * 80 * 128 * 4
    program = _program(
        "  %a = (bf16[1,8]{1,0}, bf16[4,8]{1,0}) all-gather-start(%b), replica_groups={{0,2,4,6},{1,3,5,7}}",
        "  %c = (f32[3]{0}, f32[5]{0}) all-reduce(%d, %e), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
        "  %f = f32[3]{0} add(%g, %h)",
        "  %i = ((bf16[8,2]{1,0}), bf16[8,2]{1,0}, u32[], u32[]) all-to-all-start(%b), replica_groups={}",
        "  %j = f32[3]{0} all-reduce-start(%d), replica_groups={}")
    assert [(one.kind, one.bytes, one.shape) for one in program.collectives] == [
        ("all-gather", 64, "bf16[4,8]"), ("all-reduce", 32, "f32[5]"), ("all-to-all", 32, "bf16[8,2]"),
        ("all-reduce", 12, "f32[3]")]
    assert summarize(program.collectives) == {
        "all-gather": {"count": 1, "bytes": 64}, "all-reduce": {"count": 2, "bytes": 44},
        "all-to-all": {"count": 1, "bytes": 32}}


def test_an_asynchronous_collective_has_the_shape_of_its_end():
    """GPUs sum and gather several arrays at once, and list all operands before all results."""
    program = _program(
        "  %a = ((f32[2]{0}, bf16[1,8]{1,0}), (f32[8]{0}, bf16[4,8]{1,0})) all-gather-start(%p, %q), "
        "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}",
        "  %b = (f32[8]{0}, bf16[4,8]{1,0}) all-gather-done(%a)")
    (found,) = program.collectives
    assert (found.kind, found.bytes, found.shape) == ("all-gather", 32 + 64, "bf16[4,8]")


def _roofline(program):
    chip = Chip(0, 1e6, 2e6, 4e6, None, float32_flops=0.5e6)
    return program.roofline(chip, Network("v5e:4x2", MESH, [(x, y, 0) for x in range(4) for y in range(2)]))


CUBLAS = ('  %x = (bf16[32,8]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
          'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
          '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}')


def test_a_call_of_cublas_is_a_product_and_its_scratch_memory_no_traffic():
    program = _program("  %a = bf16[32,64]{1,0} parameter(0)", "  %b = bf16[64,8]{1,0} parameter(1)", CUBLAS)
    assert program.flops == 2 * 32 * 64 * 8
    assert program.memory_traffic == 2 * (32 * 64 + 64 * 8 + 32 * 8)
    assert _roofline(program) == (2 * 32 * 64 * 8 / 1e6, 2 * (32 * 64 + 64 * 8 + 32 * 8) / 2e6, 0)
    wide = _program("  %a = f32[32,64]{1,0} parameter(0)", "  %b = f32[64,8]{1,0} parameter(1)", CUBLAS)
    assert _roofline(wide).compute == 2 * 32 * 64 * 8 / 0.5e6


@pytest.mark.parametrize("name, where", [
    ("switch_transformer_1/encoder_1/layers_1_1/mlp_1/XlaSharding_5", "encoder/layers_1/mlp"),
    ("gradient_tape/switch_transformer/decoder/layers_0/mlp/einsum", "gradient of decoder/layers_0/mlp"),
    ("gradient_tape_9/switch_transformer/encoder/layers_0/mlp/experts/einsum/Einsum",
     "gradient of encoder/layers_0/mlp/experts"),
    ("adafactor/mul", "losses and update")])
def test_a_collective_says_which_layer_it_comes_from(name, where):
    assert _read(name=name).where == where


def test_one_that_is_written_in_many_places_is_counted_once():
    line = LINE.format(kind="all-gather", groups="{}", name="a", dtype="f32")
    places = "\n".join(f"%async_collective_fusion.{index} (p: f32[8]) -> f32[8] {{\n{line.replace('%x.1', name)}\n}}"
                       for index, name in ((1, "%x.1"), (2, "%x.2")))
    assert _sent_and_carried(places, "async_collective_fusion") == (["x.1"], {"fusion.1": "x.1", "fusion.2": "x.1"})
    apart = places.replace("channel_id=1, ", "")
    assert _sent_and_carried(apart, "async_collective_fusion")[0] == ["x.1", "x.2"]


def test_sums_that_the_compiler_made_of_several_are_each_its_own_though_they_share_a_channel():
    line = LINE.format(kind="all-reduce", groups="{{0,1},{2,3},{4,5},{6,7}}", name="a", dtype="f32")
    places = "\n".join(f"%all-reduce-scatter.{index} (p: f32[8]) -> f32[8] {{\n{line.replace('%x.1', name)}\n}}"
                       for index, name in ((1, "%x.1"), (2, "%x.2")))
    assert _sent_and_carried(places, "all-reduce-scatter") == (["x.1", "x.2"], {"fusion.1": "x.1", "fusion.2": "x.2"})
    # Nor is one that nothing runs beside the same as one that lies within a fusion.
    beside = places.replace("all-reduce-scatter.1", "async_collective_fusion.1")
    own = LINE.format(kind="all-reduce", groups="{}", name="b", dtype="f32").replace("%x.1", "%x.3")
    module = hlo.Module(f"{beside}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{own}\n  %fusion.1 = f32[8] fusion(%p), "
                        "kind=kCustom, calls=%async_collective_fusion.1\n}\n")
    assert [*read_collectives(module, MESH)[0]] == ["x.1", "x.2", "x.3"]


def _sent_and_carried(places, name):
    """Names of the collectives of two computations that a fusion each runs, and which fusion carries which."""
    fusions = [f"  %fusion.{index} = f32[8] fusion(%p), kind=kCustom, calls=%{name}.{index}" for index in (1, 2)]
    module = hlo.Module(places + "\nENTRY %main.1 (p: f32[8]) -> f32[8] {\n" + "\n".join(fusions) + "\n}\n")
    found, carriers = read_collectives(module, MESH)
    return [*found], carriers


def test_a_sum_of_which_each_chip_keeps_its_part_is_a_reduce_scatter():
    line = LINE.format(kind="all-reduce", groups="{{0,2,4,6},{1,3,5,7}}", name="a", dtype="f32")
    (found,) = _program(before=f"%all-reduce-scatter.15 (p: f32[8]) -> f32[8] {{\n{line}\n}}").collectives
    assert (found.kind, found.bytes) == ("reduce-scatter", 2 * 80 * 128 * 4)


LOOP = """
%condition.1 (p.2: (s32[], f32[8])) -> pred[] {
  %limit.1 = s32[] constant(10)
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %less.1 = pred[] compare(%i.2, %limit.1), direction=LT
}
%body.1 (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[]{:S(6)}, f32[8]{0:S(1)}) parameter(0)
  %two.1 = s32[]{:S(1)} constant(2)
  %i.1 = s32[]{:S(1)} get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %r.1 = f32[8]{0} all-reduce(%x.1), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum.1
  %y.1 = f32[8]{0:S(1)} multiply(%x.1, %x.1)
  %next.1 = s32[]{:S(1)} add(%i.1, %two.1)
  ROOT %t.1 = (s32[]{:S(1)}, f32[8]{0:S(1)}) tuple(%next.1, %r.1)
}
"""
WHILE = "  %w.1 = (s32[], f32[8]{0}) while(%p), condition=%condition.1, body=%body.1"
COUNTED = WHILE + ', backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize("loop", [WHILE, COUNTED])
def test_what_a_loop_does_counts_as_often_as_it_runs(loop):
    program = _program(loop, before=LOOP)
    (found,) = program.collectives
    assert found.times == 5
    assert _roofline(program).links == pytest.approx(5 * 32 / 4e6)  # half of 32 bytes to and fro between neighbours
    assert program.memory_traffic == 5 * (32 + 32 + 32)
    assert program.unread_loops == []


@pytest.mark.parametrize("text, other", [
    ("direction=LT", "direction=NE"), ("add(%i.1", "subtract(%i.1"), ("constant(10)", "negate(%p.2)")])
def test_a_loop_that_is_not_understood_is_named_and_counts_once(text, other):
    program = _program(WHILE, before=LOOP.replace(text, other))
    assert program.unread_loops == ["w.1"]
    assert program.collectives[0].times == 1


def test_products_count_as_often_as_their_loop_runs():
    product = "  %c.1 = f32[4,32]{1,0} convolution(%a.1, %b.1), dim_labels=bf_io->bf"
    operands = "  %a.1 = f32[4,16]{1,0} parameter(0)\n  %b.1 = f32[16,32]{1,0} parameter(1)"
    body = LOOP.replace("  %y.1 = f32[8]{0:S(1)} multiply(%x.1, %x.1)", f"{operands}\n{product}")
    assert _program(WHILE, product.replace("%c.1", "%d.1"), before=body).flops == 6 * 2 * 4 * 32 * 16


def test_traffic_is_what_operations_read_and_write_in_memory():
    # Read 4 * 8 bytes twice, write 4 * 8; what lies on the chip, S(1) or S(3), and names cost nothing.
    assert _program("  %p = f32[8]{0} parameter(0)", "  %q = f32[8]{0} parameter(1)", "  %t = (f32[8]{0}) tuple(%p)",
                    "  %a = f32[8]{0} add(%p, %q), metadata={op_name=\"x\"}").memory_traffic == 96
    for memory in (1, 3):
        assert _program("  %p = f32[8]{0} parameter(0)", f"  %a = f32[8]{{0:S({memory})}} add(%p, %p)",
                        "  %b = f32[4]{0} fusion(%a), calls=%f").memory_traffic == 32 + 16


def test_a_move_between_memories_counts_its_own_size():
    # 8 of 64 numbers into the chip, then all of them from memory to memory.
    program = _program(
        "  %p = f32[64]{0} parameter(0)",
        "  %s = ((f32[64]{0}), f32[8]{0:S(1)}, u32[]) slice-start(%p), slice={[0:8]}",
        "  %d = f32[8]{0:S(1)} slice-done(%s)")
    assert program.memory_traffic == 32
    program = _program("  %p = f32[64]{0} parameter(0)",
                       "  %s = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(%p)", "  %d = f32[64]{0} copy-done(%s)")
    assert program.memory_traffic == 2 * 256


def test_a_call_that_goes_on_beside_the_core_counts_what_is_done_in_it():
    called = """%called.1 (q: f32[8], t: token[]) -> f32[32] {
  %q.1 = f32[8]{0} parameter(0)
  %t.1 = token[] parameter(1)
  ROOT %g.1 = f32[32]{0} all-gather(%q.1), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
"""
    program = _program("  %p = f32[8]{0} parameter(0)",
                       "  %s = ((f32[8]{0}, token[]), f32[32]{0}) call-start(%p, %u), to_apply=%called.1",
                       "  %d = f32[32]{0} call-done(%s)", before=called)
    assert program.memory_traffic == 32 + 128
    assert [(one.kind, one.bytes, one.group_size) for one in program.collectives] == [("all-gather", 128, 4)]


def test_of_two_branches_the_costlier_one_counts():
    branches = "\n".join(f"%{name}.1 (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n  {line}\n}}" for
                         name, line in (("yes", "%a = f32[8]{0} add(%p, %p)"), ("no", "%b = f32[8]{0} bitcast(%p)")))
    program = _program("  %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%no.1, %yes.1}", before=branches)
    assert program.memory_traffic == 64


def test_products_of_the_experts_are_found_by_name():
    line = ('  %c = bf16[2,640,256]{2,1,0} convolution(%a, %b), dim_labels=0bf_0io->0bf, '
            'metadata={op_name="encoder_1/mlp_1/experts_1/einsum"}')
    operands = "  %a = bf16[2,640,8]{2,1,0} parameter(0)", "  %b = bf16[2,8,256]{2,1,0} parameter(1)"
    assert _program(*operands, line, line.replace("experts", "wi")).expert_products == [2 * 640 * 256]


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
