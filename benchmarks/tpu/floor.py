"""The matrix products of a training step alone, by the compiler's own clock: a floor of the step's time.

    switch-tf compile ... --json --save FOLDER > ANSWER.json
    .venv/bin/python benchmarks/tpu/floor.py ANSWER.json FOLDER

Compiles every product of the optimised program as a program of its own for the same kind of chip, with operands and
result in the chip's memory. Each takes a second. The table compares them with the step.
"""

import argparse
import collections
import json
import re
import sys
from typing import NamedTuple

import saved_step

from switch_tf.aot import compiler, hlo
from switch_tf.aot.hlo import SENT, WAITING
from switch_tf.hardware import chips
from switch_tf.storage import outputs

# Of one chip.
_TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:2x2x1", "v4": "v4:2x2x1"}
_DTYPES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32", "pred": "bool"}
_MODULE = "HloModule one\n\nENTRY main {{\n  a = {0} parameter(0)\n  b = {1} parameter(1)\n  ROOT c = {2} {3}\n}}\n"


class _Product(NamedTuple):
    """Types of its operands and of its result, and the operation with its settings, as XLA writes them."""

    left: str
    right: str
    result: str
    operation: str


def main():
    """Compiles the products and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    saved_step.add_arguments(parser)
    arguments = parser.parse_args()
    answer = arguments.answer
    chip = chips.find_chip(answer["topology"])
    cycles = _Cycles(answer["topology"])
    points = [{part: count / chip.clock for part, count in cycles.by_part(
        *saved_step.program(arguments.folder, depth)).items()} for depth in answer["compiled_layers"]]
    floor = saved_step.of_all_layers(answer, points)
    step = answer["predicted"]["parts"]
    print(json.dumps({"benchmark": "tpu_floor", "topology": answer["topology"], "products": floor, "step": step}))
    print(_table(floor, step), file=sys.stderr)


class _Cycles:
    """Cycles of products on one chip of a kind, each compiled once."""

    def __init__(self, topology):
        self._device = compiler.devices_of(_TOPOLOGIES[topology.partition(":")[0]])[0]
        self._known = {}

    def by_part(self, module, origins):
        """Returns the cycles of a saved step's products, by part of the model."""
        parts = collections.Counter()
        found = [(one, module.times.get(name, 0)) for name, instructions in module.computations.items()
                 for one in instructions if one.kind in ("convolution", "dot")]
        for place, (one, times) in enumerate(found):
            parts[origins[one.name][0]] += times * self._of(_product(module, one))
            if not place % 20:
                outputs.say(f"... product {place + 1} of {len(found)}, {len(self._known)} different ones.")
        return parts

    def _of(self, product):
        if product not in self._known:
            program = hlo.Module(self._compiled(product))
            self._known[product] = max(one.cycles or 0 for one in program.instructions.values())
        return self._known[product]

    def _compiled(self, product):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from jaxlib import _hlo, _jax  # JAX has no public way from HLO

        from switch_tf.partitioning import lowering

        module = _jax.mlir.hlo_to_stablehlo(
            _hlo.hlo_module_from_text(_MODULE.format(*product)).as_serialized_hlo_module_proto())
        here = NamedSharding(Mesh([self._device], ("chip",)), PartitionSpec())
        left, right, (shape, dtype) = map(_type, product[:3])
        inputs = [jax.ShapeDtypeStruct(*operand, sharding=here) for operand in (left, right)]
        program = lowering.Program(module, [], [(shape, dtype)], [], None)
        return lowering.jit(program, inputs).lower(*inputs).compile().as_text()


def _type(text):
    """Returns (shape, dtype) of a type as XLA writes it, such as "bf16[8,128]"."""
    name, lengths = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()
    return tuple(int(length) for length in lengths.split(",") if length), _DTYPES[name]


def _product(module, instruction):
    types = [re.match(r"\w+\[[\d,]*\]", shape)[0] for shape in (
        *(module.instructions[name].shape for name in instruction.operands[:2]), instruction.shape)]
    settings = re.search(rf"{instruction.kind}\([^)]*\)(.*?)(?:, (?:frontend_attributes|metadata|backend_config)=|$)",
                         instruction.line)[1]
    return _Product(*types, f"{instruction.kind}(a, b){settings}")


def _table(floor, step):
    """Returns a Markdown table in ms: products alone, the step's core, and the latter over the former."""
    lines = [["ms", "products alone", "step", "step / products"], ["---"] * 4]
    core = {part: seconds for part, seconds in step.items() if part not in (SENT, WAITING)}
    rows = sorted({*floor, *core}, key=lambda part: -core.get(part, 0.0))
    pairs = [(part, floor.get(part, 0.0), core.get(part, 0.0)) for part in rows]
    pairs += [("the core", sum(floor.values()), sum(core.values())), ("with waits and sends", sum(floor.values()),
                                                                       sum(step.values()))]
    lines += [[part, f"{1e3 * below:.1f}", f"{1e3 * above:.1f}", f"{above / below:.2f}" if below > 1e-5 else ""]
              for part, below, above in pairs]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
