"""Sizes, factors and rules by which tokens compete for the slots of experts."""

import dataclasses
import math

from switch_tf import checks
from switch_tf.configs.semantics import Rules, rules_of
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Group sizes and expert capacity of a Switch layer. `SwitchConfig` and `layers.SwitchFeedForward` make one.

    Args:
        num_experts: int. Number of experts.
        group_size: int. Largest number of tokens per group. Tokens of a group compete for slots.
        num_groups_multiple: int. The number of groups is a multiple of it, see `groups_multiple`.
        train_capacity_factor, eval_capacity_factor: float. Slots of an expert over tokens per expert (equation 3).
        min_expert_capacity: int. Smallest number of slots, limited by the tokens of a group.
        semantics: str. Rules of grouping and capacity, see `semantics.Rules`.
        expert_capacity: int. Slots per expert and sequence, for semantics "hf" only, which requires it.

    Raises:
        Refusal: A value is out of range.
    """

    num_experts: int
    group_size: int = 4096
    num_groups_multiple: int = 1
    train_capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_expert_capacity: int = 4
    semantics: str = "switch_tf"
    expert_capacity: int | None = None

    def __post_init__(self):
        checks.fields(self, ("num_experts", "group_size", "num_groups_multiple", "min_expert_capacity"),
                      checks.integer, 1)
        checks.fields(self, ("train_capacity_factor", "eval_capacity_factor"), checks.number, "in [1e-6, 1e6]")
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
        """The number of groups is a multiple of this one.

        It is `num_groups_multiple`, and for semantics "t5x" a multiple of the number of experts. T5X's own is that of
        all replicas of the experts: devices / (NUM_EXPERT_PARTITIONS * NUM_MODEL_PARTITIONS) times the experts.
        """
        if not self.rules.groups_fit_experts:
            return self.num_groups_multiple
        return math.lcm(self.num_groups_multiple, self.num_experts)

    def capacity_factor(self, training: bool) -> float:
        """Returns the capacity factor of a training or evaluation step."""
        return self.train_capacity_factor if training else self.eval_capacity_factor
