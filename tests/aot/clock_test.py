"""The clock, on programs with times known by hand."""

import json

import pytest

from switch_tf.aot import clock, hlo
from switch_tf.aot.hlo import SENT, UNATTRIBUTED, WAITING
from switch_tf.hardware.chips import Chip

# A cycle is a millisecond, and so are 4 bytes of memory.
CHIP = Chip(memory=16e9, flops=1e3, memory_bandwidth=4e3, link_bandwidth=1.0, clock=1e3)
MS = 1e-3


def _busy(name, cycles, operands="%p", operation="switch_transformer_1/encoder_1/layers_0_1/mlp_1/MatMul"):
    return (f'  %{name} = f32[8]{{0}} fusion({operands}), kind=kLoop, calls=%f, metadata={{op_name="{operation}"}}, '
            f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}')


def _work(*lines, before="", sends=None, carriers=None):
    module = hlo.Module(before + "\nENTRY %main.1 (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
                        + "\n".join(lines) + "\n}\n")
    return module, sends or {}, carriers or {}


def _schedule(*lines, **settings):
    return clock.schedule(CHIP, *_work(*lines, **settings))


def _ms(seconds):
    return {name: round(1e3 * one, 6) for name, one in seconds.items()}


def test_the_core_does_one_thing_after_the_other():
    found = _schedule(_busy("a", 3), "  %t = (f32[8]{0}) tuple(%a)", _busy("b", 4, operation="einsum/Einsum"))
    assert found.seconds == pytest.approx(7 * MS)
    assert _ms(found.parts) == {"dense feed-forward": 3, "logits and loss": 4}
    assert _ms(found.layers) == {"encoder/layers_0": 3, "logits and loss": 4}
    assert [(span.name, span.lane, round(1e3 * span.start)) for span in found.spans] == [
        ("a", "core", 0), ("b", "core", 3)]


COPY = "  %s = (f32[8]{0:S(1)}, f32[8]{0}, u32[]) copy-start(%p)"  # 32 bytes: 8 ms
DONE = "  %d = f32[8]{0:S(1)} copy-done(%s)"


@pytest.mark.parametrize("cycles, waited", [(3, 5), (8, 0), (11, 0)])
def test_a_copy_goes_on_beside_the_core_until_it_is_waited_for(cycles, waited):
    found = _schedule(COPY, _busy("a", cycles), DONE, _busy("b", 1))
    assert found.seconds == pytest.approx((cycles + waited + 1) * MS)
    assert round(1e3 * found.parts.get(WAITING, 0)) == waited


def test_copies_take_turns():
    found = _schedule(COPY, COPY.replace("%s", "%s2"), DONE, DONE.replace("%s", "%s2").replace("%d", "%d2"))
    assert found.seconds == pytest.approx(16 * MS)
    part = "  %s = ((f32[64]{0}), f32[4]{0:S(1)}, u32[]) slice-start(%p), slice={[0:4]}"
    assert _schedule(part, "  %d = f32[4]{0:S(1)} slice-done(%s)").seconds == pytest.approx(4 * MS)


def test_what_is_sent_holds_up_the_core_unless_it_was_started_before():
    blocking = _schedule("  %r = f32[8]{0} all-reduce(%p)", _busy("a", 3), sends={"r": 5 * MS})
    assert _ms(blocking.parts) == {SENT: 5, "dense feed-forward": 3}
    started = ("  %r = f32[8]{0} all-reduce-start(%p)", _busy("a", 3), "  %e = f32[8]{0} all-reduce-done(%r)")
    assert _ms(_schedule(*started, sends={"r": 5 * MS}).parts) == {SENT: 2, "dense feed-forward": 3}
    hidden = _schedule(*started, sends={"r": 2 * MS})
    assert _ms(hidden.parts) == {"dense feed-forward": 3}
    assert [round(1e3 * span.seconds) for span in hidden.spans if span.lane == "links"] == [2]


def test_what_follows_on_the_links_waits_for_what_holds_up_the_core():
    found = _schedule("  %r = f32[8]{0} all-reduce-start(%p)", "  %q = f32[8]{0} all-to-all(%p)",
                      "  %e = f32[8]{0} all-reduce-done(%r)", sends={"r": 5 * MS, "q": 4 * MS})
    assert found.seconds == pytest.approx(9 * MS)


def test_a_collective_within_fusions_goes_on_from_the_first_to_the_last():
    lines = (_busy("s", 0).replace("0", "").replace(', backend_config={"window_config":{"estimated_cycles":""}}', ""),
             _busy("a", 3), _busy("b", 4), "  %e = f32[8]{0} fusion(%b), kind=kCustom, calls=%g")
    carriers = dict.fromkeys("sabe", "r")
    assert _ms(_schedule(*lines, sends={"r": 9 * MS}, carriers=carriers).parts) == {"dense feed-forward": 7, SENT: 2}
    assert _ms(_schedule(*lines, sends={"r": 6 * MS}, carriers=carriers).parts) == {"dense feed-forward": 7}
    alone = _schedule(lines[-1], _busy("a", 3), sends={"r": 9 * MS}, carriers={"e": "r"})
    assert _ms(alone.parts) == {SENT: 9, "dense feed-forward": 3}


BODY = """
%condition.1 (c: s32[]) -> pred[] {
  ROOT %less = pred[] parameter(0)
}
%body.1 (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
""" + _busy("inner", 2, "%q") + """
  %r = f32[8]{0} all-reduce(%inner)
}
"""
LOOP = "  %w = f32[8]{0} while(%p), condition=%condition.1, body=%body.1"
COUNTED = LOOP + ', backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_takes_as_long_as_all_its_passes():
    found = _schedule(_busy("a", 1), COUNTED, _busy("b", 1), before=BODY, sends={"r": 3 * MS})
    assert found.seconds == pytest.approx((1 + 5 * (2 + 3) + 1) * MS)
    assert _ms(found.parts) == {"dense feed-forward": 12, SENT: 15}
    assert [(span.name, round(1e3 * span.start), span.times) for span in found.spans if span.lane == "core"] == [
        ("a", 0, 1), ("inner", 1, 5), ("r", 3, 5), ("b", 26, 1)]


def test_of_two_branches_the_longer_one_counts_and_a_call_is_run():
    branches = "\n".join(f"%{name}.1 (q: f32[8]) -> f32[8] {{\n  %q{name} = f32[8]{{0}} parameter(0)\n"
                         f"{_busy(name, cycles, '%q' + name)}\n}}" for name, cycles in (("short", 2), ("long", 9)))
    line = "  %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%short.1, %long.1}"
    assert _schedule(line, before=branches).seconds == pytest.approx(9 * MS)
    assert _schedule("  %c = f32[8]{0} call(%p), to_apply=%short.1", before=branches).seconds == pytest.approx(2 * MS)


OFFLOADED = """%{name} (q: f32[2], t: token[]) -> f32[8] {{
  %q{name} = f32[2]{{0}} parameter(0)
  %t{name} = token[] parameter(1)
  ROOT %r{name} = f32[8]{{0}} all-gather(%q{name}), dimensions={{0}}
}}
"""
CALL = ('  %s{name} = ((f32[2]{{0}}, token[]), f32[8]{{0}}) call-start(%p, %t), async_execution_thread="sparsecore", '
        'to_apply=%{name}')
CALLED = "  %d{name} = f32[8]{{0}} call-done(%s{name})"


@pytest.mark.parametrize("cycles, waited", [(3, 4), (7, 0), (9, 0)])
def test_a_collective_that_a_sparsecore_sees_to_goes_on_beside_the_core(cycles, waited):
    found = _schedule(CALL.format(name="one"), _busy("a", cycles), CALLED.format(name="one"),
                      before=OFFLOADED.format(name="one"), sends={"rone": 7 * MS})
    assert found.seconds == pytest.approx((cycles + waited) * MS)
    assert round(1e3 * found.parts.get(SENT, 0)) == waited
    assert [(span.name, round(1e3 * span.seconds)) for span in found.spans if span.lane == "links"] == [("sone", 7)]


def test_collectives_of_sparsecores_take_turns_on_the_links():
    found = _schedule(*(CALL.format(name=name) for name in ("one", "two")),
                      *(CALLED.format(name=name) for name in ("one", "two")),
                      before=OFFLOADED.format(name="one") + OFFLOADED.format(name="two"),
                      sends={"rone": 7 * MS, "rtwo": 5 * MS})
    assert _ms(found.parts) == {SENT: 12}


def test_what_else_a_sparsecore_does_is_no_sending():
    called = "%one (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n" + _busy("inner", 7, "%q") + "\n}\n"
    found = _schedule(CALL.format(name="one"), _busy("a", 3), CALLED.format(name="one"), before=called)
    assert _ms(found.parts) == {"dense feed-forward": 3, WAITING: 4}
    assert {span.lane for span in found.spans} == {"core", "copies"}


def test_what_has_no_cycles_is_counted_by_its_bytes_and_named():
    found = _schedule("  %a = f32[8]{0} sort(%p), dimensions={0}, to_apply=%f", _busy("b", 1))
    assert found.seconds == pytest.approx((16 + 1) * MS)
    assert _ms(found.by_bytes) == {"sort": 16}
    named = '  %a = f32[8]{0} custom-call(%p), custom_call_target="ConcatBitcast"'
    assert (_schedule(named).seconds, _schedule(named).by_bytes) == (0, {})


def test_a_kernel_takes_what_it_says_itself():
    kernel = ('  %a = f32[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={{"custom_call_'
              'config":{{"cost_estimate":{{"flops":"{flops}","transcendentals":"0","bytes_accessed":"{size}"}}}}}}')
    assert _schedule(kernel.format(flops=30, size=4)).seconds == pytest.approx(30 * MS)
    assert _schedule(kernel.format(flops=3, size=80)).seconds == pytest.approx(20 * MS)


def test_what_has_no_name_serves_what_its_operands_do():
    found = _schedule(_busy("a", 1, operation="gradient_tape/switch_transformer/decoder/layers_1/self_attention/Sum"),
                      _busy("b", 2, "%p, %a", ""), _busy("c", 4, "%b", "AddN_3"), _busy("d", 8, "%p", ""))
    assert _ms(found.parts) == {"attention": 7, UNATTRIBUTED: 8}
    assert _ms(found.layers) == {"decoder/layers_1": 7, UNATTRIBUTED: 8}


def test_what_has_no_name_and_no_such_operand_serves_what_uses_it():
    """`b` copies a weight for attention. `d` adds up two operands, one of a layer; the operand of `f` has no layer."""
    attention = "switch_transformer_1/encoder_1/layers_0_1/attention_1/MatMul"
    found = _schedule(_busy("b", 1, "%p", ""), _busy("a", 2, "%b", attention), _busy("l", 4, "%p", "Min"),
                      _busy("d", 8, "%l, %a", "AddN_3"), _busy("f", 16, "%l", ""))
    assert _ms(found.parts) == {"attention": 1 + 2 + 8, "logits and loss": 4 + 16}


def test_a_fusion_without_a_name_serves_most_of_what_was_fused_into_it():
    scope = "switch_transformer_1/encoder_1/layers_0_1/"
    fused = "\n".join(f'  %{name} = f32[8]{{0}} add(%q), metadata={{op_name="{scope}{where}/add"}}' for name, where in (
        ("i", "mlp_1"), ("j", "attention_1"), ("k", "attention_1")))
    before = "%f (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n" + fused + "\n}\n"
    assert _ms(_schedule(_busy("a", 5, operation=""), before=before).parts) == {"attention": 5}


def test_what_a_nameless_loop_does_for_a_layer_is_that_layers():
    body = BODY.replace("switch_transformer_1/encoder_1/layers_0_1/mlp_1/MatMul", "")
    loop = COUNTED + ', metadata={op_name="switch_transformer_1/encoder_1/layers_0_1/attention_1/while"}'
    assert _ms(_schedule(loop, before=body, sends={"r": 1 * MS}).parts) == {"attention": 10, SENT: 5}
    assert _ms(_schedule(COUNTED, before=body, sends={"r": 1 * MS}).parts) == {UNATTRIBUTED: 10, SENT: 5}


RECOMPUTED = ("layers_1_3/attention_1/MatMul", "layers_1_3/mlp_1/router_1/MatMul", "layers_1_1/self_attention_1/MatMul",
              "gradient_tape/layers_1_1/mlp_1/MatMul", "gradient_tape/layers_1_3/pre_mlp_layer_norm_1/mul;x/y",
              "gradient_tape/switch_transformer/token_embedder/look_up/einsum/Einsum",
              "gradient_tape/switch_transformer/token_embedder/einsum/Einsum")


def test_a_recomputed_layer_whose_stack_the_name_has_lost_is_found_again():
    """Names as of a program with `remat`: a decoder's layer is known by its self-attention."""
    found = _schedule(*(_busy(f"a{place}", 2**place, operation=name) for place, name in enumerate(RECOMPUTED)))
    assert _ms(found.parts) == {"attention": 1 + 4, "router": 2, "dense feed-forward": 8, "norms and residuals": 16,
                                "embedding": 32, "logits and loss": 64}
    assert _ms(found.layers) == {"encoder/layers_1": 1 + 2 + 16, "decoder/layers_1": 4 + 8, "token_embedder": 32,
                                 "logits and loss": 64}


@pytest.mark.parametrize("operation, part", [
    ("encoder_1/layers_1_1/mlp_1/router_1/MatMul", "router"),
    ("encoder_1/layers_1_1/mlp_1/dispatch/einsum/Einsum", "dispatch"),
    ("encoder_1/layers_1_1/mlp_1/combine/einsum/Einsum", "combine"),
    ("encoder_1/layers_1_1/mlp_1/experts_1/einsum_1/Einsum", "experts"),
    ("encoder_1/layers_1_1/mlp_1/XlaSharding_3", "rest of Switch layers"),
    ("encoder_1/layers_0_1/mlp_1/MatMul", "dense feed-forward"),
    ("encoder_1/layers_0_1/pre_attention_layer_norm_1/mul", "norms and residuals"),
    ("encoder_1/relpos_bias_1/Sum", "attention"), ("encoder_1/encoder_norm_1/Mean", "norms and residuals"),
    ("decoder_1/layers_0_1/encoder_decoder_attention_1/Softmax", "attention"),
    ("token_embedder_1/GatherV2", "embedding"), ("decoder_1/logits_dense_1/MatMul", "logits and loss")])
def test_parts_are_recognised_by_their_scopes(operation, part):
    router = _busy("r", 1, operation="switch_transformer_1/encoder_1/layers_1_1/mlp_1/router_1/Softmax")
    for prefix in ("switch_transformer_1/", "gradient_tape/switch_transformer_1/"):
        assert _schedule(router, _busy("a", 5, operation=prefix + operation)).parts[part] >= 5 * MS


@pytest.mark.parametrize("operation", ["adafactor/sub_3", "global_norm/L2Loss_4", "adamw/mul"])
def test_the_optimizer_is_recognised_by_its_name(operation):
    assert _ms(_schedule(_busy("a", 5, operation=operation)).parts) == {"optimizer": 5}


def test_a_trace_has_a_lane_for_each_thing_that_goes_on():
    found = _schedule(COPY, _busy("a", 3), DONE, "  %r = f32[8]{0} all-reduce(%p)", sends={"r": 5 * MS})
    events = json.loads(found.trace())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = {(event["name"], lanes[event["tid"]], round(event["ts"]), round(event["dur"])) for event in events
             if event["ph"] == "X"}
    assert shown == {("s", "copies between memories", 0, 8000), ("a", "core", 0, 3000), ("d", "core", 3000, 5000),
                     ("r", "core", 8000, 5000), ("r", "links to other chips", 8000, 5000)}


def test_the_largest_number_of_cycles_stands_for_none():
    found = _schedule(_busy("a", 2**63 - 1), _busy("b", 3))
    assert _ms(found.parts) == {"dense feed-forward": 16 + 3}  # 64 bytes read and written


@pytest.mark.parametrize("contracted, expected", [(1, 16), (4, 32 * 4 / 2)])
def test_without_cycles_an_operation_takes_its_products_or_its_bytes_whichever_is_longer(contracted, expected):
    """64 bytes at 4 a millisecond, and [4, contracted] x [contracted, 2] at a FLOP a millisecond."""
    fused = (f"%f (l: bf16[4,{contracted}], r: bf16[{contracted},2]) -> f32[4,2] {{\n"
             f"  %l = bf16[4,{contracted}]{{1,0}} parameter(0)\n  %r = bf16[{contracted},2]{{1,0}} parameter(1)\n"
             "  ROOT %m = f32[4,2]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n")
    found = _schedule("  %x = f32[8]{0} fusion(%p), kind=kCustom, calls=%f", before=fused)
    assert found.seconds == pytest.approx(expected * MS)
    assert found.by_bytes == {"fusion": found.seconds}
