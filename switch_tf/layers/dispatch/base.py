"""The interface of dispatchers."""

import abc
from typing import Any

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.layers.decisions import ExpertChoices, TokenChoices
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Tensor

# Axes of the slot buffers: on the devices of the groups, on those of the experts, and as experts read them.
AT_GROUPS = (None, "group", "capacity", "expert_embed")
AT_EXPERTS = ("expert", "group", "capacity", "expert_embed")
READ_BY_EXPERTS = ("expert", "group", "capacity", "embed")


class Dispatcher(abc.ABC):
    """Moves tokens to the experts of their routing decisions and sums the gated outputs.

    `dispatch` and `combine` are pure functions of their arguments and of the decisions. Between them, `compute` applies
    the experts. A subclass with buffers inherits `compute`.

    Shapes:
        tokens: <compute dtype>[group, tokens, d_model].
        buffers: <compute dtype>[expert, group, capacity, d_model], one row per slot, zeros in empty slots. Or
            <compute dtype>[row, d_model] for a form without buffers, which overrides `compute`.
        outputs: <compute dtype>, the shape of the buffers with last dimension output_dim.
        combined: <float32>[group, tokens, output_dim], zeros for dropped tokens.

    Args:
        decisions: `decisions.TokenChoices`, or `decisions.ExpertChoices` for the forms named after them.
    """

    def __init__(self, decisions: TokenChoices | ExpertChoices):
        self.decisions: Any = decisions  # each form knows which of the two it gets

    @abc.abstractmethod
    def dispatch(self, tokens: Tensor) -> Tensor:
        """Moves rows to experts: tokens -> buffers."""

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        """Applies an ExpertFeedForward: buffers -> outputs.

        An all-to-all moves buffers from groups to experts, and another one back. If `expert_embed` is split, devices
        that share experts send a part of every row each, as in Mesh TensorFlow and T5X, instead of the same rows.
        """
        for axes in (AT_GROUPS, AT_EXPERTS, READ_BY_EXPERTS):
            buffers = partitioning.constrain(buffers, axes)
        outputs = experts(buffers, training=training)
        for axes in (AT_EXPERTS, AT_GROUPS):
            outputs = partitioning.constrain(outputs, axes)
        return outputs

    @abc.abstractmethod
    def combine(self, outputs: Tensor) -> Tensor:
        """Sums gated outputs by token: outputs -> combined."""

    def run(self, experts: ExpertFeedForward, tokens: Tensor, training: bool) -> Tensor:
        """Dispatches, applies an ExpertFeedForward and combines: tokens -> combined."""
        # `aot` attributes time by these scopes.
        with keras.name_scope("dispatch"):
            buffers = self.dispatch(tokens)
        outputs = self.compute(experts, buffers, training)
        with keras.name_scope("combine"):
            return self.combine(outputs)


def gated(outputs: Tensor, gate: Tensor) -> Tensor:
    """Multiplies <compute dtype> outputs by <float32> gates in float32. Shapes broadcast."""
    outputs = dtypes.widen(outputs)
    return outputs * ops.cast(gate, outputs.dtype)


def slot_gates(choices: ExpertChoices) -> Tensor:
    """Returns the gates of ExpertChoices as buffers have them: [expert, group, capacity, 1]."""
    return ops.transpose(choices.gate, (1, 0, 2))[..., None]
