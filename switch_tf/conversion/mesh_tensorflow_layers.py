"""Layers of a Mesh TensorFlow checkpoint, found by the names of its variables.

Mesh TensorFlow repeats a block of sublayers: with two layers to a block, variables of the third layer's attention are
in `encoder/block_001/layer_000/SelfAttention`, beside their norm in `encoder/block_001/layer_000/rms_norm`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from switch_tf import checks
from switch_tf.refusals import Refusal

SELF_ATTENTION, CROSS_ATTENTION, DENSE, EXPERTS = "SelfAttention", "EncDecAttention", "DenseReluDense", "MoE1D"
NORMS = ("rms_norm", "layer_norm")  # the second by the legacy form of its LayerStack
_SUBLAYER = re.compile(r"(encoder|decoder)/block_(\d{3,6})/layer_(\d{3,6})/(\w+)/.+")
_ORDER = {"encoder": ((SELF_ATTENTION,), (DENSE, EXPERTS)),
          "decoder": ((SELF_ATTENTION,), (CROSS_ATTENTION,), (DENSE, EXPERTS))}


class Layer(NamedTuple):
    """A layer: the `scopes` of its sublayers, such as "encoder/block_000/layer_000", and whether it has experts."""

    scopes: tuple[str, ...]
    is_sparse: bool


def layers_of(stack: str, names: Iterable[str]) -> list[Layer]:
    """Returns the layers of a stack in order.

    Args:
        stack: "encoder" or "decoder".
        names: Names of the checkpoint's variables.

    Raises:
        Refusal: A sublayer is missing, unknown or out of order.
    """
    found = [(scope, _kind(scope, kinds)) for scope, kinds in _sublayers(stack, names)]
    order = _ORDER[stack]
    for place, (scope, kind) in enumerate(found):
        expected = order[place % len(order)]
        if kind not in expected:
            raise Refusal(f"The checkpoint's {stack} must repeat {_listed(order)}, but {scope} is {kind}; other "
                          "layers have no place in a model of this package.")
    if len(found) % len(order):
        raise Refusal(f"The checkpoint's {stack} must repeat {_listed(order)}, but it ends with {found[-1][0]}, "
                      f"which is {found[-1][1]}; it is incomplete, or of another model.")
    parts = [found[start:start + len(order)] for start in range(0, len(found), len(order))]
    return [Layer(tuple(scope for scope, _ in part), part[-1][1] == EXPERTS) for part in parts]


def _sublayers(stack, names):
    """Yields the scope of each sublayer of a stack in order, with the kinds whose variables are in it."""
    kinds = {}
    for match in filter(None, map(_SUBLAYER.fullmatch, names)):
        if match[1] == stack:
            kinds.setdefault((int(match[2]), int(match[3])), set()).update({match[4]}.difference(NORMS))
    for block in range(1 + max((block for block, _ in kinds), default=-1)):
        for number in range(1 + max(number for _, number in kinds)):
            scope = f"{stack}/block_{block:03d}/layer_{number:03d}"
            if (block, number) not in kinds:
                raise Refusal(f"The checkpoint lacks {scope}, and has other layers of that block or later ones; it is "
                              "incomplete.")
            yield scope, kinds[block, number]


def _kind(scope, kinds):
    if not kinds:
        raise Refusal(f"The checkpoint holds the norm of {scope} and nothing else of that layer; it is incomplete.")
    known = {kind for order in _ORDER.values() for choice in order for kind in choice}
    if len(kinds) > 1 or not kinds <= known:
        raise Refusal(f"The checkpoint's {scope} holds {checks.shown(sorted(kinds))}, and a layer of Mesh TensorFlow "
                      f"that is read holds one of {', '.join(sorted(known))}.")
    return next(iter(kinds))


def _listed(order):
    return ", ".join(" or ".join(choice) for choice in order)
