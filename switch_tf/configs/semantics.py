"""Whose rules a model follows, where implementations of the Switch Transformer differ: one record for each of them."""

import dataclasses

from switch_tf.configs.choices import check_choice


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a checkpoint was trained with; by default the rules of this package.

    Args:
        name: str, what `semantics` calls them.
        groups_are_sequences: bool. Each sequence is a group, in which an expert has `expert_capacity` slots, a fixed
            number. Otherwise groups and slots follow from `group_size` and the capacity factors, and what is below.
        may_exceed_group_size: bool. The search for a number of groups starts at tokens / group_size rounded down, so
            that a group may be larger; otherwise up.
        rounds_capacity: bool. Slots are rounded to the nearest integer, halves to even; otherwise down.
        limits_capacity: bool. An expert has at most as many slots as the group has tokens,
        minimum_is_last: bool. ... but for `min_expert_capacity`, which then prevails.
        routes_padding: bool. Padding is routed like any token, takes slots, and counts in both losses.
        zeroes_padding: bool. It is set to zero before it reaches a layer of experts.
        zeroes_stack_padding: bool. What leaves a stack is zero at padding.
        balances_over_all_tokens: bool. The load-balancing loss divides by all tokens, masked ones included.
        balances_every_choice: bool. It counts every choice of a token, rather than the first.
        normalizes_gates: bool. The gates of several choices are divided by their sum.
        joins_layers: bool. All routers of a stack have one load-balancing loss and one z-loss, as if one router had
            seen the tokens of all; otherwise the losses of each are added up,
        omits_full_stacks: bool. ... and a stack whose every layer is sparse has none.
        starts_sparse_early: bool. Layers 1, 1 + step, ... are sparse (with step 1 all); otherwise step - 1,
            2 step - 1, ...
    """

    name: str
    groups_are_sequences: bool = False
    may_exceed_group_size: bool = False
    rounds_capacity: bool = False
    limits_capacity: bool = True
    minimum_is_last: bool = False
    routes_padding: bool = False
    zeroes_padding: bool = False
    zeroes_stack_padding: bool = True
    balances_over_all_tokens: bool = False
    balances_every_choice: bool = False
    normalizes_gates: bool = True
    joins_layers: bool = False
    omits_full_stacks: bool = False
    starts_sparse_early: bool = False

    @property
    def balance_counts_padding(self) -> bool:
        """Whether padding is in what the load-balancing loss is divided by; it is in the z-loss if it is routed."""
        return self.routes_padding or self.balances_over_all_tokens

    def sparse_layers(self, num_layers: int, step: int) -> tuple[int, ...]:
        """Indices of the layers of a stack with experts, one in `step`."""
        first = min(1, step - 1) if self.starts_sparse_early else step - 1
        return tuple(range(first, num_layers, step))


_RULES = {rules.name: rules for rules in (
    Rules("switch_tf"),
    # Mesh TensorFlow.
    Rules("mtf", may_exceed_group_size=True, minimum_is_last=True, zeroes_padding=True, balances_over_all_tokens=True),
    # T5X with Flaxformer.
    Rules("t5x", may_exceed_group_size=True, rounds_capacity=True, limits_capacity=False, routes_padding=True,
          zeroes_padding=True, balances_every_choice=True, normalizes_gates=False),
    # Hugging Face transformers.
    Rules("hf", groups_are_sequences=True, routes_padding=True, zeroes_stack_padding=False, joins_layers=True,
          omits_full_stacks=True, starts_sparse_early=True),
)}


def rules_of(semantics: str) -> Rules:
    """The rules of that name.

    Raises:
        Refusal: there are none; names the nearest.
    """
    check_choice("semantics", semantics, _RULES)
    return _RULES[semantics]
