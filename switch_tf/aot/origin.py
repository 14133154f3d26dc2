"""Where in the model an operation of the program comes from, by the name that TensorFlow gave it."""

import re

from switch_tf.aot import hlo

# What the core does where it does nothing for the model.
WAITING, SENT = "waiting for memory", "sent, not hidden"
# Parts of the model by a scope in the name of a layer; the first that matches counts.
_PARTS = ((r"logits_dense", "logits and loss"), (r"token_embedder", "embedding"), (r"router", "router"),
          (r"dispatch", "dispatch"), (r"combine", "combine"), (r"\w*experts", "experts"),
          (r"\w*norm", "norms and residuals"), (r"relpos_bias|\w*attention", "attention"))
_GRADIENT = "gradient of "
NO_LAYER = "losses and update"


def layer(operation: str) -> str:
    """The layer in the name of an operation: "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of
    encoder/layers_1/mlp".
    """
    parts = [part for part in operation.split("/") if part]
    stack = next((place for place, part in enumerate(parts)
                  if re.fullmatch(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?", part)), None)
    if stack is None:
        return NO_LAYER
    # TensorFlow numbers names that it has seen before: layers_1_1, mlp_1.
    scopes = [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[stack:-1]
              if not re.match(r"jit\(|einsum", part)]
    is_gradient = any("gradient_tape" in part or "ent_tape" in part for part in parts)
    return (_GRADIENT if is_gradient else "") + "/".join(scopes)


class Origins:
    """The part of the model, and the layer, that each operation of a program serves.

    What has no name of its own, such as a copy, serves what the first of its operands does that has one.

    Args:
        module: Module.
        default: the part of operations whose name has no layer in it.
    """

    def __init__(self, module: hlo.Module, default: str):
        self._default = default
        self._found = {}
        sparse = {layer(one.operation).removeprefix(_GRADIENT).partition("/router")[0]
                  for one in module.instructions.values() if "router" in one.operation}
        for instructions in module.computations.values():
            for one in instructions:
                found = _origin(one.operation, sparse, default) or next(
                    (self._found[name] for name in one.operands if name in self._found), None)
                if found:
                    self._found[one.name] = found

    def part(self, instruction: hlo.Instruction) -> str:
        """Such as "attention"."""
        return self._found.get(instruction.name, (self._default, ""))[0]

    def layer(self, instruction: hlo.Instruction) -> str:
        """Such as "encoder/layers_1"; the part for what serves no layer."""
        return self._found.get(instruction.name, (self._default, self._default))[1]


def _origin(operation, sparse, default):
    """(part, layer) by a name alone; None where it does not tell."""
    if not operation or re.match(r"(AddN|XLA_Args)", operation):
        return None
    if re.match(r"(\w+/)*(global_norm|adafactor|adam\w*|sgd|lion)(_\d+)?/", operation):
        return "optimizer", "optimizer"
    where = layer(operation).removeprefix(_GRADIENT)
    if where == NO_LAYER:
        return default, default
    scopes = where.split("/")
    of_layer = "/".join(scopes[:2]) if len(scopes) > 1 and scopes[1].startswith("layers_") else scopes[0]
    for pattern, part in _PARTS:
        if any(re.fullmatch(pattern, scope) for scope in scopes):
            return part, of_layer
    if "mlp" not in scopes:
        return "norms and residuals", of_layer
    is_sparse = "/".join(scopes[:scopes.index("mlp") + 1]) in sparse
    return "rest of Switch layers" if is_sparse else "dense feed-forward", of_layer
