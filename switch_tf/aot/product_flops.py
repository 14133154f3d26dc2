"""FLOPs of a matrix product in an optimised program. TPUs have it as a convolution, GPUs as a call of cuBLAS."""

import functools
import math
import re
from collections.abc import Callable, Sequence

from switch_tf.aot import hlo
from switch_tf.hardware.chips import Chip


def of(module: hlo.Module, instruction: hlo.Instruction) -> float:
    """Counts the FLOPs of a product."""
    return count(instruction.line, hlo.lengths(instruction.shape),
                 lambda operand: hlo.lengths(module.instructions[operand].shape))


def seconds(module: hlo.Module, instruction: hlo.Instruction, chip: Chip) -> float:
    """Returns the least seconds of a product on a chip, or of all products in what a fusion calls."""
    if instruction.is_product:
        is_float32 = module.instructions[instruction.operands[0]].shape.startswith("f32")
        return of(module, instruction) / (is_float32 and chip.float32_flops or chip.flops)
    return sum(seconds(module, inner, chip) for name in instruction.called.get("calls", ())
               for inner in module.computations.get(name, ()))


def count(line: str, result: Sequence[int], shape_of: Callable[[str], Sequence[int]]) -> float:
    """Counts the multiplications and additions of a "convolution", a "dot" or a call of cuBLAS.

    Args:
        line: Instruction in XLA's text.
        result: Shape of the result.
        shape_of: Maps the name of an operand to its shape.
    """
    operands = re.search(r" (?:convolution|dot|custom-call)\((.*?)\)", line)[1]
    left, right = map(shape_of, re.findall(r"%([\w.\-]+)", operands)[:2])
    if " convolution(" not in line:
        contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', line)[1]
        return 2.0 * math.prod(result) * math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracted))
    of_left, of_right, of_result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line).groups()
    total = 2.0 * left[of_left.index("b")] * right[of_right.index("i")] * right[of_right.index("o")]
    window = re.search(r"window=\{([^}]*)\}", line)
    settings = dict(entry.split("=") for entry in window[1].split()) if window else {}
    for place in map(str, range(sum(label.isdigit() for label in of_left))):
        def setting(name, default, place=int(place)):
            return int(settings[name].split("x")[place].partition("_")[0]) if name in settings else default

        total *= _steps(left[of_left.index(place)], result[of_result.index(place)], setting("size", 1),
                        setting("stride", 1), setting("pad", 0), setting("lhs_dilate", 1), setting("rhs_dilate", 1))
    return total


@functools.cache
def _steps(length, result, size, stride, pad, dilation, window_dilation):
    """Counts the pairs of a result and a window position along one dimension that read an input.

    Batch dimensions of a product become such windows, mostly over padding and dilation.
    """
    places = (at * stride - pad + step * window_dilation for at in range(result) for step in range(size))
    return sum(0 <= place <= (length - 1) * dilation and place % dilation == 0 for place in places)
