"""Routing and loss rules of each Switch Transformer implementation."""

import dataclasses
import math

from switch_tf import checks
from switch_tf.configs.choices import RULES, check_choice, check_fields
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Rules:
    """Routing and loss rules of one implementation. The defaults are this package's rules.

    Args:
        groups_are_sequences: Each sequence is a group with `expert_capacity` slots per expert. Otherwise `group_size`
            and capacity factors decide.
        groups_fit_experts: The number of groups is also a multiple of the number of experts. Rows or columns of zeros
            complete the batch, routed like tokens. Otherwise masked tokens complete the last group.
        may_exceed_group_size: Rounds the number of groups, tokens / group_size, down instead of up.
        is_exact: Computes the capacity without floating-point errors.
        rounds_capacity: Rounds the capacity to nearest, halves to even, instead of down.
        limits_capacity: Limits the capacity to the tokens of a group.
        minimum_is_last: Applies `min_expert_capacity` after that limit, not before.
        routes_padding: Padding is routed, takes slots and counts in both losses.
        masks_decoder_inputs: Decoder padding follows the inputs, so the position after the end of a sequence is real.
            Otherwise it follows the targets.
        zeroes_padding: Sets padding to zero before each Switch layer.
        zeroes_stack_padding: Sets padding to zero in the outputs of a stack.
        averages_over_padding: Divides the training cross-entropy by all targets, padding included.
        balances_over_all_tokens: Divides the load-balancing loss by all tokens, padding included.
        balances_every_choice: Counts every choice of a token in the load-balancing loss, not just the first.
        normalizes_gates: Divides the gates of several choices by their sum.
        joins_layers: Computes one load-balancing loss and one z-loss over all routers of a stack. Otherwise sums the
            routers' losses.
        omits_full_stacks: A stack with only sparse layers has no router losses.
        starts_sparse_early: Layers 1, 1 + step, ... are sparse (all for step 1), not step - 1, 2 step - 1, ...
    """

    name: str
    groups_are_sequences: bool = False
    groups_fit_experts: bool = False
    may_exceed_group_size: bool = False
    is_exact: bool = True
    rounds_capacity: bool = False
    limits_capacity: bool = True
    minimum_is_last: bool = False
    routes_padding: bool = False
    masks_decoder_inputs: bool = False
    zeroes_padding: bool = False
    zeroes_stack_padding: bool = True
    averages_over_padding: bool = False
    balances_over_all_tokens: bool = False
    balances_every_choice: bool = False
    normalizes_gates: bool = True
    joins_layers: bool = False
    omits_full_stacks: bool = False
    starts_sparse_early: bool = False

    @property
    def balance_counts_padding(self) -> bool:
        """Whether padding counts in the load-balancing loss's divisor."""
        return self.routes_padding or self.balances_over_all_tokens

    def sparse_layers(self, num_layers: int, step: int) -> tuple[int, ...]:
        """Returns the indices of a stack's sparse layers, one in `step`."""
        first = min(1, step - 1) if self.starts_sparse_early else step - 1
        return tuple(range(first, num_layers, step))


_RULES = {rules.name: rules for rules in (
    Rules("switch_tf"),
    # Mesh TensorFlow.
    Rules("mtf", may_exceed_group_size=True, is_exact=False, minimum_is_last=True, zeroes_padding=True,
          averages_over_padding=True, balances_over_all_tokens=True),
    # T5X with Flaxformer.
    Rules("t5x", groups_fit_experts=True, may_exceed_group_size=True, is_exact=False, rounds_capacity=True,
          limits_capacity=False, routes_padding=True, masks_decoder_inputs=True, zeroes_padding=True,
          balances_every_choice=True, normalizes_gates=False),
    # Hugging Face transformers.
    Rules("hf", groups_are_sequences=True, routes_padding=True, zeroes_stack_padding=False, joins_layers=True,
          omits_full_stacks=True, starts_sparse_early=True),
)}


def rules_of(semantics: str) -> Rules:
    """Returns the rules of that name."""
    check_choice("semantics", semantics, _RULES)
    return _RULES[semantics]


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Group sizes and expert capacity of a Switch layer. `SwitchConfig` documents its fields."""

    num_experts: int
    group_size: int = 4096
    num_groups_multiple: int = 1
    train_capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_expert_capacity: int = 4
    semantics: str = "switch_tf"
    expert_capacity: int | None = None

    def __post_init__(self):
        check_fields(self, RULES)
        if self.rules.groups_are_sequences:
            checks.fields(self, ("expert_capacity",), checks.integer, 1)
        elif self.expert_capacity is not None:
            raise Refusal(
                f"expert_capacity={checks.shown(self.expert_capacity)} belongs to a sparse model with semantics='hf'; "
                "elsewhere train_capacity_factor, eval_capacity_factor and min_expert_capacity decide the capacity.")

    @property
    def rules(self) -> Rules:
        """The rules of `semantics`."""
        return rules_of(self.semantics)

    @property
    def groups_multiple(self) -> int:
        """A divisor of the number of groups.

        Semantics "t5x" takes the least common multiple with the number of experts. T5X multiplies the experts by their
        replicas, devices / (NUM_EXPERT_PARTITIONS * NUM_MODEL_PARTITIONS).
        """
        if not self.rules.groups_fit_experts:
            return self.num_groups_multiple
        return math.lcm(self.num_groups_multiple, self.num_experts)
