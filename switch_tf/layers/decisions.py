"""What a policy is asked, and its two kinds of answers: tokens choose experts, or experts choose tokens.

Both kinds know what the dispatch and the statistics need: how many experts and slots there are, and which were filled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from switch_tf import partitioning
from switch_tf.configs.choices import DISPATCHES, check_choice
from switch_tf.layers import dispatch as dispatching
from switch_tf.metrics import Mean
from switch_tf.refusals import Refusal


class Scores(NamedTuple):
    """What a policy decides on.

    `selection`: <float32>[group, tokens, expert], finite; higher is preferred. None where a policy has no kernel.
    `probs`: <router dtype>[group, tokens, expert], the router's softmax, or None likewise.
    `is_real`: <bool>[group, tokens], False at padding, or None.
    `token_ids`: <int32>[group, tokens], or None where the caller has none.
    """

    selection: Any
    probs: Any
    is_real: Any = None
    token_ids: Any = None


class Options(NamedTuple):
    """What a policy keeps to.

    `num_experts`: int.
    `capacity`: int or int32 scalar tensor, slots of each expert for each group.
    `num_choices`: int, experts that each token goes to.
    `is_normalized`: bool. The gates of several choices are divided by their sum.
    `training`: bool.
    `is_wanted`: function of <float32>[group, tokens, choice] gates that says which choices after the first are carried
        out, <bool> of the same shape; None for all.
    """

    num_experts: int
    capacity: Any
    num_choices: int = 1
    is_normalized: bool = True
    training: bool = False
    is_wanted: Callable | None = None


class Counts(NamedTuple):
    """What was decided, summed over groups.

    `load`: Mean of <float32>[expert], how many tokens wanted each expert, or whom it took where experts choose.
    `num_filled`: <float32> scalar, slots that hold a token.
    `num_served`: <float32> scalar, tokens that lie in a slot.
    """

    load: Mean
    num_filled: Any
    num_served: Any


class TokenChoices(NamedTuple):
    """Tokens choose experts.

    `expert_index`: <int32>[group, tokens, choice], the chosen expert.
    `slot`: <int32>[group, tokens, choice], the token's place in its expert's buffer, in [0, capacity); `capacity` where
        the choice was dropped or the token is padding. No two choices of a group share an expert's slot.
    `gate`: <float32>[group, tokens, choice], what the expert's output is multiplied by; 0 where there is no slot.
    `num_experts`: int.
    `capacity`: int or int32 scalar tensor, slots of each expert for each group.
    """

    expert_index: Any
    slot: Any
    gate: Any
    num_experts: int
    capacity: Any

    @property
    def is_filled(self):
        """Whether a choice lies in a slot: <bool>[group, tokens, choice]."""
        return self.slot < self.capacity

    def counts(self, is_real=None, preferred=None, dtype="float32") -> Counts:
        """Counts, of load by first choice.

        Args:
            is_real: <bool>[group, tokens], False at padding, or None.
            preferred: <int32>[group, tokens], the expert that each token wanted, or None for its first choice.
            dtype: of the counts.
        """
        wants = ops.one_hot(self.expert_index[..., 0] if preferred is None else preferred, self.num_experts,
                            dtype="int32")
        if is_real is not None:
            wants = wants * ops.cast(is_real[..., None], "int32")
        load = ops.cast(ops.sum(wants, axis=(0, 1)), dtype)
        is_filled = self.is_filled
        return Counts(Mean(load, ops.sum(load)), ops.sum(ops.cast(is_filled, dtype)),
                      ops.sum(ops.cast(ops.any(is_filled, axis=-1), dtype)))

    @property
    def gates(self):
        """The gate of each expert for each token, 0 where it does not go: <float32>[group, tokens, expert]."""
        expert = ops.one_hot(self.expert_index, self.num_experts, dtype=self.gate.dtype)
        return ops.sum(expert * self.gate[..., None], axis=2)

    def dispatcher(self, dispatch: str):
        """What carries these decisions out, see `layers.dispatch`.

        Args:
            dispatch: "einsum", "index", "ragged", or "auto" for the fastest for the device and the load.
        """
        check_choice("dispatch", dispatch, DISPATCHES)
        kinds = {"einsum": dispatching.Einsum, "index": dispatching.Index, "ragged": dispatching.Ragged,
                 "gather": dispatching.Gather}
        return kinds[dispatching.best(self) if dispatch == "auto" else dispatch](self)


class ExpertChoices(NamedTuple):
    """Experts choose tokens, any number of them the same one.

    `token_index`: <int32>[group, expert, slot], the token in each slot, of which there are at most as many as tokens;
        the number of tokens where it is empty.
    `gate`: <float32>[group, expert, slot], what the slot's output is multiplied by; 0 where it is empty.
    `num_tokens`: int or int32 scalar tensor, tokens of a group.
    `num_experts`, `capacity`: as in TokenChoices.
    """

    token_index: Any
    gate: Any
    num_tokens: Any
    num_experts: int
    capacity: Any

    def counts(self, is_real=None, preferred=None, dtype="float32") -> Counts:
        """Counts, of load by who was taken; arguments as for TokenChoices, which do not matter here."""
        num_groups = ops.shape(self.token_index)[0]
        is_filled = ops.cast(self.token_index < self.num_tokens, "int32")
        load = ops.cast(ops.sum(is_filled, axis=(0, 2)), dtype)
        num_filled = ops.sum(load)
        group = partitioning.arange(num_groups)[:, None, None]
        token = ops.reshape(self.token_index + group * (self.num_tokens + 1), (-1,))
        times_taken = ops.segment_sum(ops.reshape(is_filled, (-1,)), token,
                                      num_segments=num_groups * (self.num_tokens + 1))
        return Counts(Mean(load, num_filled), num_filled, ops.sum(ops.cast(times_taken > 0, dtype)))

    @property
    def gates(self):
        """As of TokenChoices; the number of tokens has to be known."""
        token = ops.one_hot(self.token_index, self.num_tokens, dtype=self.gate.dtype)  # zeros for an empty slot
        return ops.einsum("gest,ges->gte", token, self.gate)

    def dispatcher(self, dispatch: str):
        """As of TokenChoices, without "ragged"."""
        check_choice("dispatch", dispatch, DISPATCHES)
        if dispatch == "ragged":
            raise Refusal("dispatch='ragged' leaves out empty slots, and where experts choose there are none; "
                          "use 'index' or 'auto'.")
        kinds = {"einsum": dispatching.EinsumOfExperts, "index": dispatching.IndexOfExperts}
        return kinds[dispatching.best_of_experts() if dispatch == "auto" else dispatch](self)
