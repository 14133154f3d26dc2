"""Parses XLA's text of an optimised program, and attributes operations to layers and parts of the model.

A TPU's matrix product is a convolution, a GPU's a call of cuBLAS.
"""

import collections
import functools
import math
import re
from typing import NamedTuple

from switch_tf.hardware.chips import Chip

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
# Only name values.
NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))
# Kind of an operation -> role of its computations. The costliest counts.
INNER = {"while": "body", "conditional": "branches", "call": "to_apply", "call-start": "to_apply"}
# JAX's call of TensorFlow's program (`lowering.jit`).
_CALLER = re.compile(r"^jit\(step\)/call_exported(/|$)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls|(?:branch|true|false)_computations?)="
                     r"\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_CUBLAS = 'custom_call_target="__cublas'
# VMEM, and CMEM of v4.
_ON_CHIP = re.compile(r"S\([13]\)")
_WINDOW = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}


# Not the model's work.
WAITING, SENT = "waiting for memory", "sent, not hidden"
# By scope of a layer. The first match counts.
_LOSS = "logits and loss"  # also operations without a layer
_PARTS = {_LOSS: r"logits_dense", "embedding": r"look_up|token_embedder", "router": r"router", "dispatch": r"dispatch",
          "combine": r"combine", "experts": r"\w*experts", "norms and residuals": r"\w*norm",
          "attention": r"relpos_bias|\w*attention"}
_GRADIENT = "gradient of "
NO_LAYER = "losses and update"
UNATTRIBUTED = "unattributed"
_STACK = re.compile(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?")
# Several layers may share their results.
_SHARED = ("parameter", "constant", "tuple", "after-all", "opt-barrier", "while", "conditional", "call")


class Array(NamedTuple):
    """One array of a shape.

    Attributes:
        text: XLA's text, without the layout.
    """

    text: str
    bytes: int
    is_on_chip: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        shape: XLA's text of the result's shape.
        kind: Such as "fusion".
        line: Whole text.
        operands: Their names.
        called: Names of the called computations by role: "body", "condition", "to_apply", "calls", "branches".
        cycles: Estimated cycles on the core, or None.
        operation: TensorFlow's name, with scopes, or "".
    """

    name: str
    shape: str
    kind: str
    line: str
    operands: list[str]
    called: dict[str, list[str]]
    cycles: int | None
    operation: str

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product. False for a fusion with one."""
        return self.kind in ("convolution", "dot") or self.kind == "custom-call" and _CUBLAS in self.line

    @property
    def written(self) -> list[Array]:
        """Arrays of its result, without cuBLAS's scratch memory."""
        return arrays(re.sub(r", s8\[\d+\]\{0\}\)$", ")", self.shape) if _CUBLAS in self.line else self.shape)


class Module:
    """A parsed program.

    Attributes:
        computations: Name -> instructions in the order of the schedule.
        entry: Name of the computation that a step runs.
        loops: Name of a "while" -> number of its passes, None if unreadable.
        times: Name of a computation -> runs in a step. Unreadable loops count once.
        stacks: Stack of each rematerialised layer: "layers_1_3" -> "encoder". It runs again outside its stack's scope:
            "layers_1_3/mlp_1/MatMul". Only a decoder has a scope named self_attention.
    """

    def __init__(self, hlo: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = None
        current = []
        for line in hlo.splitlines():
            if header := re.match(r"(ENTRY )?%(\S+) \(", line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif match := re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(", line):
                name, shape, kind = match.groups()
                called = {}
                for role, names in _CALLED.findall(line):
                    called.setdefault("branches" if "_computation" in role else role, []).extend(_NAME.findall(names))
                operands = _NAME.findall(line.partition(f" {kind}(")[2].partition(")")[0])
                cycles = re.search(rf'"estimated_cycles":"(?!{2**63 - 1}")(\d+)"', line)  # the largest number: unknown
                operation = re.search(r'op_name="([^"]*)"', line)
                current.append(Instruction(
                    name, shape, kind, line, operands, called, int(cycles[1]) if cycles else None,
                    _CALLER.sub("", operation[1]) if operation else ""))
        self.instructions = {instruction.name: instruction for instructions in self.computations.values()
                             for instruction in instructions}

    @functools.cached_property
    def loops(self) -> dict[str, int | None]:
        return {name: self._count(instruction) for name, instruction in self.instructions.items()
                if instruction.kind == "while"}

    def _count(self, loop):
        """Reads the number of passes, or the limit of a counter from zero."""
        if match := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
            return int(match[1])
        condition, body = (next(inner for inner in self.computations[loop.called[role][0]] if "ROOT " in inner.line)
                           for role in ("condition", "body"))
        if condition.kind != "compare" or "direction=LT" not in condition.line:
            return None
        counter, limit = condition.operands
        place = re.search(r"index=(\d+)", self.instructions[counter].line)
        step = place and self.instructions[body.operands[int(place[1])]]
        if not step or step.kind != "add":
            return None
        constants = {name: int(match[1]) for name in (limit, *step.operands) if name in self.instructions and (
            match := re.search(r" constant\((\d+)\)", self.instructions[name].line))}
        size = next(filter(None, map(constants.get, step.operands)), None)
        return math.ceil(constants[limit] / size) if constants.get(limit) and size else None

    @functools.cached_property
    def times(self) -> dict[str, int]:
        times = {self.entry: 1}
        waiting = [self.entry]
        while waiting:
            caller = waiting.pop()
            for instruction in self.computations[caller]:
                count = self.loops.get(instruction.name) or 1
                for name in sum(instruction.called.values(), []):
                    if name in self.computations and times.get(name, 0) < times[caller] * count:
                        times[name] = times[caller] * count
                        waiting.append(name)
        return times

    @functools.cached_property
    def stacks(self) -> dict[str, str]:
        scopes = {}
        for instruction in self.instructions.values():
            parts = instruction.operation.partition(";")[0].split("/")
            place = next((place for place, part in enumerate(parts) if re.fullmatch(r"layers_\d+(_\d+)?", part)), None)
            if place is not None and not any(map(_STACK.fullmatch, parts[:place])):
                scopes.setdefault(parts[place], set()).update(parts[place + 1:place + 2])
        return {name: "decoder" if any("self_attention" in scope for scope in within) else "encoder"
                for name, within in scopes.items()}

    def layer(self, instruction: Instruction) -> str:
        """Returns the layer in the name of an operation.

        "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of encoder/layers_1/mlp".
        """
        parts = [part for part in instruction.operation.partition(";")[0].split("/") if part]
        start, stack = next(((place, self.stacks.get(part)) for known in (_STACK.fullmatch, self.stacks.get)
                             for place, part in enumerate(parts) if known(part)), (None, None))
        if start is None:
            return NO_LAYER
        # TensorFlow numbers repeated names: layers_1_1, mlp_1.
        scopes = [stack] * (stack is not None) + [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part)
                                                  for part in parts[start:-1] if not re.match(r"jit\(|einsum", part)]
        is_gradient = any("gradient_tape" in part or "ent_tape" in part for part in parts)
        return (_GRADIENT if is_gradient else "") + "/".join(scopes)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions of a fusion, [] for other instructions."""
        return [inner for name in instruction.called.get("calls", ()) for inner in self.computations.get(name, ())]

    def product_seconds(self, instruction: Instruction, chip: Chip) -> float:
        """Returns the least seconds of a product on a chip, or of a fusion's products."""
        if not instruction.is_product:
            return sum(self.product_seconds(inner, chip) for inner in self.fused(instruction))
        is_float32 = self.instructions[instruction.operands[0]].shape.startswith("f32")
        return self.flops(instruction) / (is_float32 and chip.float32_flops or chip.flops)

    def flops(self, product: Instruction) -> float:
        """Counts the FLOPs of a matrix product."""
        left, right = (lengths(self.instructions[name].shape) for name in product.operands[:2])
        result = lengths(product.shape)
        if product.kind != "convolution":
            contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', product.line)[1]
            return 2.0 * math.prod(result) * math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracted))
        of_left, of_right, of_result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.line).groups()
        total = 2.0 * left[of_left.index("b")] * right[of_right.index("i")] * right[of_right.index("o")]
        places = sorted(filter(str.isdigit, of_left))
        window = re.search(r"window=\{([^}]*)\}", product.line)
        given = dict(entry.split("=") for entry in window[1].split()) if window else {}
        settings = ([int(text.partition("_")[0]) for text in given[name].split("x")] if name in given else
                    [default] * len(places) for name, default in _WINDOW.items())
        for place, *setting in zip(places, *settings, strict=True):
            total *= _steps(left[of_left.index(place)], result[of_result.index(place)], *setting)
        return total


@functools.cache
def _steps(length, result, size, stride, pad, dilation, window_dilation):
    """Counts the pairs of a result and a window position along one dimension that read an input.

    Batch dimensions become such windows, mostly over padding and dilation.
    """
    places = (at * stride - pad + step * window_dilation for at in range(result) for step in range(size))
    return sum(0 <= place <= (length - 1) * dilation and place % dilation == 0 for place in places)


def lengths(shape: str) -> list[int]:
    """Returns the dimensions of a (tuple's first) array."""
    return [int(length) for length in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if length]


def arrays(shape: str) -> list[Array]:
    """Returns the arrays in a shape's text."""
    return [Array(text, _BYTES[dtype] * math.prod(lengths(text)), _ON_CHIP.search(layout) is not None)
            for text, dtype, layout in re.findall(r"((\w+)\[[\d,]*\])(\{[^}]*\})?", shape) if dtype in _BYTES]


def attribute(module: Module) -> dict[str, tuple[str, str]]:
    """Returns (part of the model, layer) of each operation, such as ("attention", "encoder/layers_1").

    A nameless operation, such as a copy, belongs to the layer of most operations fused into it, else of its first
    attributed operand, consumer or caller. Otherwise it is `UNATTRIBUTED`.
    """
    sparse = {module.layer(instruction).removeprefix(_GRADIENT).partition("/router")[0]
              for instruction in module.instructions.values() if "router" in instruction.operation}
    origins = {name: origin for name, instruction in module.instructions.items()
               if (origin := _origin(instruction.operation, module.layer(instruction), sparse))}

    def adopt(instruction, candidates, only_layers=False):
        candidates = (origin for origin in candidates if origin and not (only_layers and origin[0] == _LOSS))
        if instruction.name not in origins and (origin := next(candidates, None)):
            origins[instruction.name] = origin

    for instructions in module.computations.values():
        nameless = [instruction for instruction in instructions
                    if instruction.name not in origins and instruction.kind not in _SHARED]
        consumers = {}
        for instruction in instructions:
            for operand in instruction.operands:
                consumers.setdefault(operand, []).append(instruction.name)
        for instruction in nameless:
            fused = collections.Counter(origins.get(inner.name) for inner in module.fused(instruction))
            adopt(instruction, [origin for origin, _ in fused.most_common()], only_layers=True)
        for only_layers in (True, False):
            for instruction in nameless:
                adopt(instruction, map(origins.get, instruction.operands), only_layers)
            for instruction in reversed(nameless):
                adopt(instruction, map(origins.get, consumers.get(instruction.name, ())), only_layers)
    for caller in module.instructions.values():
        for computation in sum(caller.called.values(), []):
            for instruction in module.computations.get(computation, ()):
                adopt(instruction, [origins.get(caller.name)])
    return dict.fromkeys(module.instructions, (UNATTRIBUTED, UNATTRIBUTED)) | origins


def _origin(operation, where, sparse):
    """Returns (part, layer) by name, or None."""
    if not operation or re.match(r"(AddN|XLA_Args)", operation):
        return None
    if re.match(r"(\w+/)*(global_norm|adafactor|adam\w*|sgd|lion)(_\d+)?/", operation):
        return "optimizer", "optimizer"
    if where == NO_LAYER:
        return _LOSS, _LOSS
    if where == _GRADIENT + "token_embedder" and re.search(r"/(MatMul|Einsum)[^/]*$", operation):
        return _LOSS, _LOSS  # tied logits; the look-up's gradient has the scope look_up
    scopes = where.removeprefix(_GRADIENT).split("/")
    of_layer = "/".join(scopes[:2]) if len(scopes) > 1 and scopes[1].startswith("layers_") else scopes[0]
    for part, pattern in _PARTS.items():
        if any(re.fullmatch(pattern, scope) for scope in scopes):
            return part, of_layer
    if "mlp" not in scopes:
        return "norms and residuals", of_layer
    is_sparse = "/".join(scopes[:scopes.index("mlp") + 1]) in sparse
    return "rest of Switch layers" if is_sparse else "dense feed-forward", of_layer
