"""Attribution of a program's operations to layers and parts of the model, by the names that TensorFlow gives them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from switch_tf.aot import hlo

# Parts of a step without work for the model.
WAITING, SENT = "waiting for memory", "sent, not hidden"
# Parts of the model by a scope in the name of a layer. The first match counts.
_PARTS = ((r"logits_dense", "logits and loss"), (r"look_up|token_embedder", "embedding"), (r"router", "router"),
          (r"dispatch", "dispatch"), (r"combine", "combine"), (r"\w*experts", "experts"),
          (r"\w*norm", "norms and residuals"), (r"relpos_bias|\w*attention", "attention"))
_GRADIENT = "gradient of "
NO_LAYER = "losses and update"
# Operations without any link to a part of the model.
UNATTRIBUTED = "unattributed"
_STACK = re.compile(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?")
# Kinds of operations with shared results, which do not identify a layer.
_SHARED = ("parameter", "constant", "tuple", "after-all", "opt-barrier", "while", "conditional", "call")


def layer(operation: str, stacks: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the layer in the name of an operation.

    For example "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of encoder/layers_1/mlp".

    Args:
        operation: TensorFlow's name, with its scopes.
        stacks: Result of `stacks_of`.
    """
    parts = [part for part in operation.partition(";")[0].split("/") if part]
    start = next((place for place, part in enumerate(parts) if _STACK.fullmatch(part)), None)
    stack = []
    if start is None:
        start = next((place for place, part in enumerate(parts) if part in stacks), None)
        if start is None:
            return NO_LAYER
        stack = [stacks[parts[start]]]
    # TensorFlow numbers repeated names: layers_1_1, mlp_1.
    scopes = stack + [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[start:-1]
                      if not re.match(r"jit\(|einsum", part)]
    is_gradient = any("gradient_tape" in part or "ent_tape" in part for part in parts)
    return (_GRADIENT if is_gradient else "") + "/".join(scopes)


def stacks_of(module: hlo.Module) -> dict[str, str]:
    """Returns the stack of each layer that a program recomputes: "layers_1_3" -> "encoder".

    Rematerialisation runs a layer again outside the scopes of its model and stack: "layers_1_3/mlp_1/MatMul". Only a
    decoder has a scope named self_attention.
    """
    scopes = {}
    for instruction in module.instructions.values():
        parts = instruction.operation.partition(";")[0].split("/")
        place = next((place for place, part in enumerate(parts) if re.fullmatch(r"layers_\d+(_\d+)?", part)), None)
        if place is not None and not any(map(_STACK.fullmatch, parts[:place])):
            scopes.setdefault(parts[place], set()).update(parts[place + 1:place + 2])
    return {name: "decoder" if any("self_attention" in scope for scope in within) else "encoder"
            for name, within in scopes.items()}


class Attribution:
    """Part of the model and layer of each operation of a program.

    An operation belongs to the layer in its name. One without a name, such as a copy, belongs where the operations
    fused into it do, else to the layer of its first attributed operand, consumer or caller, in this order. Any other
    is `UNATTRIBUTED`.

    Args:
        module: Parsed program.
        default: Part of operations with a name that contains no layer.
    """

    def __init__(self, module: hlo.Module, default: str):
        self._default = default
        stacks = stacks_of(module)
        sparse = {layer(instruction.operation, stacks).removeprefix(_GRADIENT).partition("/router")[0]
                  for instruction in module.instructions.values() if "router" in instruction.operation}
        # Name of an operation -> (part, layer).
        self._origins = {name: origin for name, instruction in module.instructions.items()
                         if (origin := _origin(instruction.operation, sparse, default, stacks))}
        for instructions in module.computations.values():
            self._attribute(instructions, module)
        for caller in module.instructions.values():
            for computation in sum(caller.called.values(), []):
                for instruction in module.computations.get(computation, ()):
                    if instruction.name not in self._origins and caller.name in self._origins:
                        self._origins[instruction.name] = self._origins[caller.name]

    def part(self, instruction: hlo.Instruction) -> str:
        """Returns the part of the model, such as "attention"."""
        return self._origins.get(instruction.name, (UNATTRIBUTED, ""))[0]

    def layer(self, instruction: hlo.Instruction) -> str:
        """Returns the layer, such as "encoder/layers_1", or the part if the operation serves no layer."""
        return self._origins.get(instruction.name, (UNATTRIBUTED, UNATTRIBUTED))[1]

    def _attribute(self, instructions, module):
        """Attributes the nameless operations of one computation, in the order of their schedule."""
        nameless = [instruction for instruction in instructions
                    if instruction.name not in self._origins and instruction.kind not in _SHARED]
        consumers = {}
        for instruction in instructions:
            for operand in instruction.operands:
                consumers.setdefault(operand, []).append(instruction.name)
        for instruction in nameless:
            fused = [inner.name for name in instruction.called.get("calls", ())
                     for inner in module.computations.get(name, ())]
            self._adopt(instruction, sorted(fused, key=lambda name: -self._count(fused, name)))
        for only_layers in (True, False):
            for instruction in nameless:
                self._adopt(instruction, instruction.operands, only_layers)
            for instruction in reversed(nameless):
                self._adopt(instruction, consumers.get(instruction.name, ()), only_layers)

    def _count(self, names, name):
        """Counts the operations with the origin of `name`."""
        return sum(self._origins.get(other) == self._origins.get(name) for other in names)

    def _adopt(self, instruction, names, only_layers=True):
        """Gives an operation without an origin the first origin among `names`."""
        origins = (self._origins[name] for name in names if name in self._origins)
        if instruction.name not in self._origins and (
                origin := next((origin for origin in origins if not only_layers or origin[0] != self._default), None)):
            self._origins[instruction.name] = origin


def _origin(operation, sparse, default, stacks):
    """Returns (part, layer) by the name alone, or None."""
    if not operation or re.match(r"(AddN|XLA_Args)", operation):
        return None
    if re.match(r"(\w+/)*(global_norm|adafactor|adam\w*|sgd|lion)(_\d+)?/", operation):
        return "optimizer", "optimizer"
    where = layer(operation, stacks)
    if where == NO_LAYER:
        return default, default
    if where == _GRADIENT + "token_embedder" and re.search(r"/(MatMul|Einsum)[^/]*$", operation):
        return "logits and loss", "logits and loss"  # tied logits; the embedding's own gradient has the scope look_up
    scopes = where.removeprefix(_GRADIENT).split("/")
    of_layer = "/".join(scopes[:2]) if len(scopes) > 1 and scopes[1].startswith("layers_") else scopes[0]
    for pattern, part in _PARTS:
        if any(re.fullmatch(pattern, scope) for scope in scopes):
            return part, of_layer
    if "mlp" not in scopes:
        return "norms and residuals", of_layer
    is_sparse = "/".join(scopes[:scopes.index("mlp") + 1]) in sparse
    return "rest of Switch layers" if is_sparse else "dense feed-forward", of_layer
