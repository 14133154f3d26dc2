"""Where in the model an operation of the program comes from, by the name that TensorFlow gave it."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from switch_tf.aot import hlo

# What the core does where it does nothing for the model.
WAITING, SENT = "waiting for memory", "sent, not hidden"
# Parts of the model by a scope in the name of a layer; the first that matches counts.
_PARTS = ((r"logits_dense", "logits and loss"), (r"look_up|token_embedder", "embedding"), (r"router", "router"),
          (r"dispatch", "dispatch"), (r"combine", "combine"), (r"\w*experts", "experts"),
          (r"\w*norm", "norms and residuals"), (r"relpos_bias|\w*attention", "attention"))
_GRADIENT = "gradient of "
NO_LAYER = "losses and update"
# Operations that nothing links to a part of the model.
UNATTRIBUTED = "unattributed"
_STACK = re.compile(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?")
# Kinds of operations whose results are shared, so they say nothing about the layer that uses them.
_SHARED = ("parameter", "constant", "tuple", "after-all", "opt-barrier", "while", "conditional", "call")


def layer(operation: str, stacks: Mapping[str, str] = MappingProxyType({})) -> str:
    """The layer in the name of an operation: "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of
    encoder/layers_1/mlp".

    Args:
        operation: TensorFlow's name, with its scopes.
        stacks: from `stacks_of`.
    """
    parts = [part for part in operation.partition(";")[0].split("/") if part]
    start = next((place for place, part in enumerate(parts) if _STACK.fullmatch(part)), None)
    stack = []
    if start is None:
        start = next((place for place, part in enumerate(parts) if part in stacks), None)
        if start is None:
            return NO_LAYER
        stack = [stacks[parts[start]]]
    # TensorFlow numbers names that it has seen before: layers_1_1, mlp_1.
    scopes = stack + [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[start:-1]
                      if not re.match(r"jit\(|einsum", part)]
    is_gradient = any("gradient_tape" in part or "ent_tape" in part for part in parts)
    return (_GRADIENT if is_gradient else "") + "/".join(scopes)


def stacks_of(module: hlo.Module) -> dict[str, str]:
    """The stack of each layer that a program recomputes: "layers_1_3" -> "encoder".

    Rematerialisation runs a layer again outside the scopes of its model and stack: "layers_1_3/mlp_1/MatMul". Only a
    decoder has self-attention by that name.
    """
    scopes = {}
    for one in module.instructions.values():
        parts = one.operation.partition(";")[0].split("/")
        place = next((place for place, part in enumerate(parts) if re.fullmatch(r"layers_\d+(_\d+)?", part)), None)
        if place is not None and not any(map(_STACK.fullmatch, parts[:place])):
            scopes.setdefault(parts[place], set()).update(parts[place + 1:place + 2])
    return {name: "decoder" if any("self_attention" in scope for scope in within) else "encoder"
            for name, within in scopes.items()}


class Attribution:
    """The part of the model, and the layer, that each operation of a program serves.

    A name with a layer in it decides. An operation without a name, such as a copy, serves what was fused into it, else
    the first of its operands, else of its consumers, that serves a layer; else what calls it. What has no such relative
    is `UNATTRIBUTED`.

    Args:
        module: Module.
        default: the part of operations whose name has no layer in it.
    """

    def __init__(self, module: hlo.Module, default: str):
        self._default = default
        stacks = stacks_of(module)
        sparse = {layer(one.operation, stacks).removeprefix(_GRADIENT).partition("/router")[0]
                  for one in module.instructions.values() if "router" in one.operation}
        self._found = {name: found for name, one in module.instructions.items()
                       if (found := _origin(one.operation, sparse, default, stacks))}
        for instructions in module.computations.values():
            self._attribute(instructions, module)
        for caller in module.instructions.values():
            for computation in sum(caller.called.values(), []):
                for one in module.computations.get(computation, ()):
                    if one.name not in self._found and caller.name in self._found:
                        self._found[one.name] = self._found[caller.name]

    def part(self, instruction: hlo.Instruction) -> str:
        """Such as "attention"."""
        return self._found.get(instruction.name, (UNATTRIBUTED, ""))[0]

    def layer(self, instruction: hlo.Instruction) -> str:
        """Such as "encoder/layers_1"; the part for what serves no layer."""
        return self._found.get(instruction.name, (UNATTRIBUTED, UNATTRIBUTED))[1]

    def _attribute(self, instructions, module):
        """Attributes the nameless operations of one computation, in the order of their schedule."""
        # A weight or a tuple is shared by operations that have nothing else in common.
        nameless = [one for one in instructions if one.name not in self._found and one.kind not in _SHARED]
        consumers = {}
        for one in instructions:
            for operand in one.operands:
                consumers.setdefault(operand, []).append(one.name)
        for one in nameless:
            fused = [inner.name for name in one.called.get("calls", ()) for inner in module.computations.get(name, ())]
            self._adopt(one, sorted(fused, key=lambda name: -self._count(fused, name)))
        for only_layers in (True, False):
            for one in nameless:
                self._adopt(one, one.operands, only_layers)
            for one in reversed(nameless):
                self._adopt(one, consumers.get(one.name, ()), only_layers)

    def _count(self, names, name):
        """How many of the operations serve what `name` does."""
        return sum(self._found.get(other) == self._found.get(name) for other in names)

    def _adopt(self, one, names, only_layers=True):
        """Lets an operation that is not attributed yet serve what the first of these does."""
        found = (self._found[name] for name in names if name in self._found)
        if one.name not in self._found and (
                origin := next((origin for origin in found if not only_layers or origin[0] != self._default), None)):
            self._found[one.name] = origin


def _origin(operation, sparse, default, stacks):
    """(part, layer) by a name alone; None where it does not tell."""
    if not operation or re.match(r"(AddN|XLA_Args)", operation):
        return None
    if re.match(r"(\w+/)*(global_norm|adafactor|adam\w*|sgd|lion)(_\d+)?/", operation):
        return "optimizer", "optimizer"
    where = layer(operation, stacks)
    if where == NO_LAYER:
        return default, default
    if where == _GRADIENT + "token_embedder" and re.search(r"/(MatMul|Einsum)[^/]*$", operation):
        return "logits and loss", "logits and loss"  # tied to the embedding, whose own gradient has the scope look_up
    scopes = where.removeprefix(_GRADIENT).split("/")
    of_layer = "/".join(scopes[:2]) if len(scopes) > 1 and scopes[1].startswith("layers_") else scopes[0]
    for pattern, part in _PARTS:
        if any(re.fullmatch(pattern, scope) for scope in scopes):
            return part, of_layer
    if "mlp" not in scopes:
        return "norms and residuals", of_layer
    is_sparse = "/".join(scopes[:scopes.index("mlp") + 1]) in sparse
    return "rest of Switch layers" if is_sparse else "dense feed-forward", of_layer
