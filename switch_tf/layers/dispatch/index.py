"""Dispatch by gathers."""

from keras import ops

from switch_tf.layers.decisions import TokenChoices
from switch_tf.layers.dispatch.base import Dispatcher, gated, slot_gates
from switch_tf.layers.dispatch.rows import collect, fill, gather, read_or_zero, row_maps, sum_rows
from switch_tf.partitioning.tensors import Tensor


class Index(Dispatcher):
    """Dispatches TokenChoices by gathers in both directions."""

    def __init__(self, decisions: TokenChoices):
        super().__init__(decisions)
        num_groups = ops.shape(decisions.slot)[0]
        self._buffer_shape = (decisions.num_experts, num_groups, decisions.capacity)
        row = buffer_index(decisions) * decisions.capacity + decisions.slot
        self._maps = row_maps(decisions.is_filled, row, decisions.num_experts * num_groups * decisions.capacity)

    def dispatch(self, tokens: Tensor) -> Tensor:
        return ops.reshape(fill(tokens, self._maps, read_or_zero), (*self._buffer_shape, tokens.shape[-1]))

    def combine(self, outputs: Tensor) -> Tensor:
        rows = ops.reshape(outputs, (-1, outputs.shape[-1]))
        return sum_choices(collect(rows, self._maps, read_or_zero), self.decisions.gate)


class ExpertChoiceIndex(Dispatcher):
    """Dispatches ExpertChoices by a gather, and combines by a segment sum."""

    def dispatch(self, tokens: Tensor) -> Tensor:
        token, num_tokens = self._token_of_slot()
        rows = gather(ops.reshape(tokens, (-1, tokens.shape[-1])), ops.reshape(token, (-1,)), num_tokens)
        return ops.reshape(rows, (*ops.shape(token), tokens.shape[-1]))

    def combine(self, outputs: Tensor) -> Tensor:
        token, num_tokens = self._token_of_slot()
        outputs = gated(outputs, slot_gates(self.decisions))
        width = outputs.shape[-1]
        summed = sum_rows(ops.reshape(outputs, (-1, width)), ops.reshape(token, (-1,)), num_tokens)
        return ops.reshape(summed, (-1, self.decisions.num_tokens, width))

    def _token_of_slot(self):
        """Returns the token of each slot over all groups, <int32>[expert, group, capacity], and the number of tokens.

        Empty slots have the number of tokens.
        """
        token, num_tokens = self.decisions.token_index, self.decisions.num_tokens
        num_groups = ops.shape(token)[0]
        group = ops.arange(num_groups, dtype="int32")[:, None, None]
        token = ops.where(token < num_tokens, token + group * num_tokens, num_groups * num_tokens)
        return ops.transpose(token, (1, 0, 2)), num_groups * num_tokens


def buffer_index(decisions: TokenChoices) -> Tensor:
    """Returns the buffer of each choice, expert * groups + group: <int32>[group, tokens, choice]."""
    num_groups = ops.shape(decisions.slot)[0]
    group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
    return decisions.expert_index * num_groups + group


def sum_choices(outputs: Tensor, gate: Tensor) -> Tensor:
    """Sums the gated outputs of each token's choices.

    Args:
        outputs: <compute dtype>[token * choice, width].
        gate: <float32>[group, tokens, choice].

    Returns:
        <float32>[group, tokens, width]
    """
    num_choices = gate.shape[-1]
    outputs = ops.reshape(outputs, (*ops.shape(gate)[:2], num_choices, outputs.shape[-1]))
    outputs = gated(outputs, ops.expand_dims(gate, -1))
    return ops.squeeze(outputs, 2) if num_choices == 1 else ops.sum(outputs, axis=2)
