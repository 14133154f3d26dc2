"""FLOPs of products as XLA writes them for TPUs: windows over padding and dilation are batched products."""

import pytest

from switch_tf.aot import hlo


def _flops(kind, settings, result, left, right):
    shapes = [f"f32[{','.join(map(str, shape))}]" for shape in (left, right, result)]
    module = hlo.Module(f"ENTRY %main (p: f32[]) -> f32[] {{\n  %a.1 = {shapes[0]} parameter(0)\n"
                        f"  %b.2 = {shapes[1]} parameter(1)\n  %c.3 = {shapes[2]}{{0}} {kind}(%a.1, %b.2), {settings}, "
                        'metadata={op_name="x"}\n}\n')
    return module.flops(module.instructions["c.3"])


@pytest.mark.parametrize("settings, result, left, right, pairs", [
    ("window={size=1}, dim_labels=0bf_io0->0bf", (64, 512, 256), (64, 512, 32), (32, 256, 1), 64 * 512 * 256 * 32),
    ("dim_labels=bf_io->bf", (4, 32), (4, 16), (16, 32), 4 * 32 * 16),
    # A dimension of the right side alone: every result lies over the one input at one place of the window.
    ("window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f", (64, 512, 4, 256),
     (64, 512, 128, 1), (4, 256, 128, 1), 64 * 512 * 4 * 256 * 128),
    # One that is summed over: heads.
    ("window={size=1x4}, dim_labels=0b1f_1io0->0bf1", (64, 512, 128, 1), (64, 512, 4, 256), (4, 256, 128, 1),
     64 * 512 * 128 * 4 * 256),
    # Two that both sides have: scores of each sequence and head.
    ("window={size=64x4 stride=63x3 lhs_dilate=64x4}, dim_labels=01bf_01io->01bf", (64, 4, 512, 500),
     (64, 4, 512, 256), (64, 4, 256, 500), 64 * 4 * 512 * 500 * 256)])
def test_a_convolution_is_the_product_that_it_stands_for(settings, result, left, right, pairs):
    assert _flops("convolution", settings, result, left, right) == 2 * pairs


def test_a_dot_sums_over_what_it_contracts():
    settings = "lhs_batch_dims={0}, lhs_contracting_dims={2}"
    assert _flops("dot", settings, (3, 5, 7), (3, 5, 11), (3, 11, 7)) == 2 * 3 * 5 * 7 * 11
