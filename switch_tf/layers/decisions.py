"""Inputs and outputs of routing policies."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from keras import ops

from switch_tf.configs.policies import Policy
from switch_tf.metrics import Mean
from switch_tf.ops import indexing
from switch_tf.partitioning.tensors import Tensor


class Scores(NamedTuple):
    """Inputs of a routing policy.

    `selection`: <float32>[group, tokens, expert], finite. Higher is preferred. None without learned scores.
    `probs`: <router dtype>[group, tokens, expert], the router's softmax. None without learned scores.
    `is_real`: <bool>[group, tokens], False at padding.
    `token_ids`: <int32>[group, tokens] or None.
    """

    selection: Any
    probs: Any
    is_real: Any
    token_ids: Any = None


class Options(NamedTuple):
    """Settings of one call of a routing policy.

    `capacity`: int or int32 scalar tensor. Slots per expert and group.
    `num_choices`: Experts per token.
    `is_normalized`: Whether gates of several choices are divided by their sum.
    `policy`: Record with the policy's parameters.
    `uniform`: Maps a shape to <float32> draws in [0, 1). None at inference.
    `state`: <float32>[expert] vectors named by `policy.state`.
    """

    num_experts: int
    capacity: Any
    num_choices: int = 1
    is_normalized: bool = True
    training: bool = False
    policy: Policy | None = None
    uniform: Callable | None = None
    state: Mapping[str, Any] = MappingProxyType({})


class TokenChoices(NamedTuple):
    """Decisions of tokens that choose experts.

    `expert_index`: <int32>[group, tokens, choice].
    `slot`: <int32>[group, tokens, choice]. Position in the expert's buffer, in [0, capacity), unique per group and
        expert. Dropped choices and padding have `capacity`.
    `gate`: <float32>[group, tokens, choice]. Factor of the expert's output. 0 without a slot.
    `capacity`: See `Options`.
    """

    expert_index: Any
    slot: Any
    gate: Any
    num_experts: int
    capacity: Any

    @property
    def is_filled(self) -> Tensor:
        """Whether each choice has a slot: <bool>[group, tokens, choice]."""
        return self.slot < self.capacity

    def counts(self, is_real: Tensor, chosen: Tensor | None, dtype: str) -> tuple[Mean, Tensor, Tensor]:
        """Counts load, filled slots and tokens with a slot over all groups: `(load, num_filled, num_served)`.

        `load` is a Mean of <dtype>[expert]: tokens by first choice before capacity, or tokens taken if experts choose.
        A token counts for the first of `chosen`, <int32>[group, tokens, choice].
        """
        wants = ops.one_hot(chosen[..., 0], self.num_experts, dtype="int32")
        wants = wants * ops.cast(is_real[..., None], "int32")
        load = ops.cast(ops.sum(wants, axis=(0, 1)), dtype)
        is_filled = self.is_filled
        return (Mean(load, ops.sum(load)), ops.sum(ops.cast(is_filled, dtype)),
                ops.sum(ops.cast(ops.any(is_filled, axis=-1), dtype)))

    @property
    def gates(self) -> Tensor:
        """Gates by expert, <float32>[group, tokens, expert], 0 for experts without the token."""
        expert = ops.one_hot(self.expert_index, self.num_experts, dtype=self.gate.dtype)
        return ops.sum(expert * self.gate[..., None], axis=2)


class ExpertChoices(NamedTuple):
    """Decisions of experts that choose tokens. Several may choose one token.

    `token_index`: <int32>[group, expert, slot], for min(capacity, num_tokens) slots. `num_tokens` in empty slots.
    `gate`: <float32>[group, expert, slot]. Factor of the slot's output. 0 in empty slots.
    `num_tokens`: int or int32 scalar tensor. Tokens per group.
    `capacity`: See `Options`.
    """

    token_index: Any
    gate: Any
    num_tokens: Any
    num_experts: int
    capacity: Any

    def counts(self, is_real: Tensor, chosen: Tensor | None, dtype: str) -> tuple[Mean, Tensor, Tensor]:
        """Counts as `TokenChoices.counts`. Ignores `is_real` and `chosen`."""
        num_groups = ops.shape(self.token_index)[0]
        is_filled = ops.cast(self.token_index < self.num_tokens, "int32")
        load = ops.cast(ops.sum(is_filled, axis=(0, 2)), dtype)
        num_filled = ops.sum(load)
        times_taken = indexing.count_into_bins(ops.reshape(self.token_index, (num_groups, -1)), self.num_tokens + 1)
        times_taken = times_taken[:, :self.num_tokens]
        return Mean(load, num_filled), num_filled, ops.sum(ops.cast(times_taken > 0, dtype))

    @property
    def gates(self) -> Tensor:
        """Gates as in `TokenChoices.gates`. Requires a known number of tokens."""
        token = ops.one_hot(self.token_index, self.num_tokens, dtype=self.gate.dtype)  # zeros for an empty slot
        return ops.einsum("gest,ges->gte", token, self.gate)

    @property
    def gate_of_slot(self) -> Tensor:
        """Gates in the order of the buffers: <float32>[expert, group, capacity, 1]."""
        return ops.transpose(self.gate, (1, 0, 2))[..., None]
