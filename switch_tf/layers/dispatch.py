"""Carries tokens to the slots their router chose and the experts' outputs back: two ways, the same numbers.

`Einsum` is GShard's form (section 3.1 there): products with one-hot masks, which TPU partitioners turn into one
all-to-all each way; its cost grows with tokens times slots. `Index` moves rows by index. On the tokens that were kept,
the maps from slot to token and from token to slot are inverse, so the gradient of each gather is the other gather: no
scatter of rows, and cost and memory grow with tokens. It is the faster one on CPU and GPU.
"""

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.config import DISPATCHES, check_choice
from switch_tf.layers.routing import Decisions

BUFFER_AXES = ("expert", None, "capacity", "embed")


def create(dispatch: str, decisions: Decisions, num_experts: int, expert_capacity):
    """The dispatch named "einsum" or "index", or with "auto" the one for the device at hand."""
    check_choice("dispatch", dispatch, DISPATCHES)
    if dispatch == "auto":
        dispatch = "einsum" if _is_on_tpu() else "index"
    return (Einsum if dispatch == "einsum" else Index)(decisions, num_experts, expert_capacity)


def _is_on_tpu() -> bool:
    return any("TPU" in device.upper() for device in keras.distribution.list_devices())


class Einsum:
    """Dispatch and combine by products with masks.

    Args:
        decisions: the router's, see `routing.Decisions`.
        num_experts: int.
        expert_capacity: int or int32 scalar tensor, slots of each expert and group.
    """

    def __init__(self, decisions, num_experts, expert_capacity):
        self.decisions = decisions
        self.num_experts = num_experts
        self.expert_capacity = expert_capacity

    def _mask(self, choice, dtype):
        """One where a token fills a slot, exact in any dtype: <dtype>[group, tokens, expert, capacity]."""
        expert = ops.one_hot(self.decisions.expert_index[:, :, choice], self.num_experts, dtype=dtype)
        # A dropped token's slot lies beyond the last one, and its one-hot row is zero.
        slot = ops.one_hot(self.decisions.slot[:, :, choice], self.expert_capacity, dtype=dtype)
        mask = ops.expand_dims(expert, -1) * ops.expand_dims(slot, -2)
        return partitioning.constrain(mask, ("group", None, None, "capacity"))

    def dispatch(self, tokens):
        """Fills the experts' buffers: [group, tokens, d_model] -> [expert, group, capacity, d_model]."""
        num_choices = self.decisions.slot.shape[-1]
        mask = sum(self._mask(choice, tokens.dtype) for choice in range(num_choices))
        return ops.einsum("gsec,gsm->egcm", mask, tokens)

    def combine(self, outputs):
        """Brings gated outputs back: [expert, group, capacity, d_model] -> <float32>[group, tokens, d_model]."""
        combined = 0.0
        for choice in range(self.decisions.slot.shape[-1]):
            own = ops.einsum("gsec,egcm->gsm", self._mask(choice, outputs.dtype), outputs)
            combined = combined + ops.cast(own, "float32") * self.decisions.gate[:, :, choice:choice + 1]
        return combined


class Index:
    """Dispatch and combine by gathers in both directions; arguments as for `Einsum`."""

    def __init__(self, decisions, num_experts, expert_capacity):
        num_groups, group_tokens = ops.shape(decisions.slot)[:2]
        self.num_choices = decisions.slot.shape[-1]
        self.gate = decisions.gate
        self.shape = (num_experts, num_groups, expert_capacity)
        num_slots = num_experts * num_groups * expert_capacity
        num_rows = num_groups * group_tokens * self.num_choices
        # [group, tokens, choice] -> flat slot, or `num_slots` where there is none
        group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
        slot = (decisions.expert_index * num_groups + group) * expert_capacity + decisions.slot
        slot = ops.where(decisions.slot < expert_capacity, slot, num_slots)
        # [token, choice]
        self.slot_of_choice = ops.reshape(slot, (-1, self.num_choices))
        # Integers alone are scattered, once: which choice fills each slot, `num_rows` where none does.
        filled = ops.scatter(ops.reshape(slot, (-1, 1)), ops.arange(1, num_rows + 1, dtype="int32"), (num_slots + 1,))
        filled = filled[:num_slots]
        self.choice_of_slot = ops.where(filled > 0, filled - 1, num_rows)
        self.token_of_slot = self.choice_of_slot // self.num_choices

    def dispatch(self, tokens):
        """Fills the experts' buffers: [group, tokens, d_model] -> [expert, group, capacity, d_model]."""
        d_model = tokens.shape[-1]
        rows = ops.reshape(tokens, (-1, d_model))
        back = [self.slot_of_choice[:, choice] for choice in range(self.num_choices)]
        return ops.reshape(_move(rows, [self.token_of_slot], back), (*self.shape, d_model))

    def combine(self, outputs):
        """Brings gated outputs back: [expert, group, capacity, d_model] -> <float32>[group, tokens, d_model]."""
        d_model = outputs.shape[-1]
        num_groups, group_tokens = ops.shape(self.gate)[:2]
        rows = ops.reshape(outputs, (-1, d_model))
        own = _move(rows, [ops.reshape(self.slot_of_choice, (-1,))], [self.choice_of_slot])
        own = ops.reshape(own, (num_groups, group_tokens, self.num_choices, d_model))
        return ops.sum(ops.cast(own, "float32") * ops.expand_dims(self.gate, -1), axis=2)


def _move(rows, there, back):
    """Sum of gathers of `rows` by the indices `there`, whose gradient is the sum of gathers by `back`.

    Indices one past the last row read zeros.
    """

    def gather(rows, indices):
        padded = ops.concatenate([rows, ops.zeros((1, rows.shape[-1]), rows.dtype)], axis=0)
        return sum(ops.take(padded, index, axis=0) for index in indices)

    @ops.custom_gradient
    def move(rows):
        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            return gather(upstream, back)

        return gather(rows, there), gradient

    return move(rows)
