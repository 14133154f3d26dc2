"""Dispatch by products with one-hot masks."""

from keras import ops

from switch_tf import partitioning
from switch_tf.layers.dispatch.base import Dispatcher, gated, slot_gates
from switch_tf.partitioning.tensors import Tensor


class Einsum(Dispatcher):
    """Dispatches TokenChoices by products with masks."""

    def dispatch(self, tokens: Tensor) -> Tensor:
        mask = sum(self._mask(choice, tokens.dtype) for choice in range(self.decisions.slot.shape[-1]))
        return ops.einsum("gsec,gsm->egcm", mask, tokens)

    def combine(self, outputs: Tensor) -> Tensor:
        combined = 0.0
        for choice in range(self.decisions.slot.shape[-1]):
            rows = ops.einsum("gsec,egcm->gsm", self._mask(choice, outputs.dtype), outputs)
            combined = combined + gated(rows, self.decisions.gate[:, :, choice:choice + 1])
        return combined

    def _mask(self, choice, dtype):
        """Returns 1 where a token fills a slot, else 0: <dtype>[group, tokens, expert, capacity]."""
        expert = ops.one_hot(self.decisions.expert_index[:, :, choice], self.decisions.num_experts, dtype=dtype)
        # A dropped token's slot is `capacity`, so its one-hot row is zero.
        slot = ops.one_hot(self.decisions.slot[:, :, choice], self.decisions.capacity, dtype=dtype)
        mask = ops.expand_dims(expert, -1) * ops.expand_dims(slot, -2)
        return partitioning.constrain(mask, ("group", None, None, "capacity"))


class ExpertChoiceEinsum(Dispatcher):
    """Dispatches ExpertChoices by products with masks."""

    def dispatch(self, tokens: Tensor) -> Tensor:
        return ops.einsum("gsec,gsm->egcm", self._mask(tokens.dtype), tokens)

    def combine(self, outputs: Tensor) -> Tensor:
        outputs = gated(outputs, slot_gates(self.decisions))
        return ops.einsum("gsec,egcm->gsm", self._mask(outputs.dtype), outputs)

    def _mask(self, dtype):
        """Returns 1 where a token fills a slot, else 0: <dtype>[group, tokens, expert, capacity]."""
        # The index of an empty slot is `num_tokens`, so its one-hot row is zero.
        mask = ops.one_hot(self.decisions.token_index, self.decisions.num_tokens, axis=1, dtype=dtype)
        return partitioning.constrain(mask, ("group", None, None, "capacity"))
