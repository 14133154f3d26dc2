"""Bundles of the compiler's final schedule, on schedules that are counted by hand."""

import pathlib
import sys

import pytest

from switch_tf.aot import hlo

# The benchmarks are programs, no package.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "tpu"))
import bundles

HEADER = "= control target key start\nLH: loop header\nLB: loop body\n= control target key end\n\n"
STRAIGHT = "     0   :  { %3 = vsyncpa [#allocation1], 0 }\n   0x1   :  {}\n   0x2   :  { %5 = vnop }\n"
EXIT = "   0x9   : {} {{ %p = scmp.ge.s32.totalorder %s18_s18, {} /* loop exit test */ }}\n"
INSTRUCTION = "%{} = f32[8]{{0}} fusion({}), kind=kLoop, calls=%{}, metadata={{op_name=\"a/b\"}}"


def loop(body, rounds, depth=1):
    marks = "> " * depth
    return f"   0x3 LB: {marks}{{ %a = vadd }}\n{body}" + EXIT.format(marks.strip(), rounds)


@pytest.mark.parametrize("text, expected", [
    (STRAIGHT, 3),
    (STRAIGHT + loop("   0x4   :  {}\n", 5) + "   0xa   :  { %6 = sbr.rel }\n", 3 + 3 * 5 + 1),
    (loop(loop("", 7, depth=2) + STRAIGHT, 5), (2 + 2 * 7 + 3) * 5),
    (loop("", 5) + loop("", 2), 2 * 5 + 2 * 2),
    (loop("", "%s4"), None),
    (loop("   0x4 LB: > > { %inner = vadd }\n", 5), None), ("   0x3 LB: > { %a = vadd }\n", None)])
def test_loops_count_as_often_as_they_run(text, expected):
    assert bundles.count(HEADER + text) == expected


def write(folder, stamp, instruction, text):
    name = instruction.split()[0][1:]
    (folder / f"{stamp}-{name}-00-schedule-analysis_final_bundles.txt").write_text(
        f"Schedule analysis:\n\ttotal scheduled bundles: 9\n\t 9.00 scheduled bundles (100.00%): {instruction}\n")
    (folder / f"{stamp}-{name}-01-final_bundles.txt").write_text(HEADER + text)


def test_operations_are_known_by_their_text_as_several_programs_have_the_same_names(tmp_path):
    first, second = INSTRUCTION.format("fusion.1", "%a", "f"), INSTRUCTION.format("fusion.1", "%b", "f")
    write(tmp_path, 11, first, STRAIGHT)
    write(tmp_path, 12, second, STRAIGHT * 2)
    write(tmp_path, 13, INSTRUCTION.format("fusion.2", "%b", "f"), loop("", "%s4"))
    (tmp_path / "14-TLP-00-hlo.txt").write_text("something else")
    assert bundles.read(tmp_path) == {"%fusion.1 = f32[8]{0} fusion(%a": 3, "%fusion.1 = f32[8]{0} fusion(%b": 6}


def test_operations_that_differ_in_names_alone_are_scheduled_once():
    cycles = ', backend_config={"window_config":{"estimated_cycles":"5"}}'
    fused = ("%{0} (x: f32[8]) -> f32[8] {{\n  %{1} = f32[8]{{0}} parameter(0)\n"
             "  ROOT %{2} = f32[8]{{0}} {3}(%{1})\n}}\n\n")
    module = hlo.Module(
        fused.format("f", "x", "r", "exponential") + fused.format("g", "y", "s", "exponential")
        + fused.format("h", "z", "t", "negate")
        + "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n  %q = f32[8]{0:S(1)} copy(%p)\n"
        + "\n".join(f"  {INSTRUCTION.format(*names)}{cycles}" for names in (
            ("a", "%p", "f"), ("b", "%a", "g"), ("c", "%b", "h"), ("d", "%q", "f"))) + "\n}\n")
    assert bundles.of_module(module, {"%a = f32[8]{0} fusion(%p": 7}) == {"a": 7, "b": 7}


def test_the_flags_name_the_folder():
    assert "--xla_jf_dump_to=/somewhere " in bundles.flags("/somewhere")
