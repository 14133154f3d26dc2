"""Routing policies, one record each: a function and its properties.

Configurations read the properties without importing Keras, so a record may give the location of its function instead.
`register` makes a policy available by name in `SwitchConfig`, gin and `layers.Router`.
"""

import dataclasses
import pkgutil
from collections.abc import Callable

from switch_tf import checks
from switch_tf.configs.choices import EXPLORATIONS, SECOND_EXPERT_POLICIES, check_choice, nearest
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Policy:
    """Assignment of tokens to experts.

    Args:
        name: str. Name in configurations.
        decide: Function of `(scores, options)`, see `layers.decisions`. Returns TokenChoices, or ExpertChoices if
            `experts_choose`. May be given as "module:function", which is imported at the first call.
        num_choices: int or None. Experts per token. None leaves the number to `num_selected_experts`.
        fewest_choices: int. Smallest valid `num_selected_experts`.
        is_causal: bool. Whether later tokens never change the expert or slot of an earlier one. Required in decoders.
        is_balanced: bool. Whether experts get equal shares without a load-balancing loss.
        has_kernel: bool. Whether the router learns scores. Otherwise `scores.selection` and `scores.probs` are None.
        needs_token_ids: bool. Whether `scores.token_ids` is required.
        experts_choose: bool. Whether experts choose tokens instead of tokens experts.
        counts_preference: bool. Whether statistics and balance loss count a token for the expert with its highest score
            instead of the one that it was sent to.

    Raises:
        ValueError: The properties contradict each other.
    """

    name: str
    decide: Callable | str
    num_choices: int | None = 1
    fewest_choices: int = 1
    is_causal: bool = False
    is_balanced: bool = False
    has_kernel: bool = True
    needs_token_ids: bool = False
    experts_choose: bool = False
    counts_preference: bool = False

    def __post_init__(self):
        checks.fields(self, ("name",), checks.text)
        checks.fields(self, ("num_choices",), checks.optional, checks.integer, 1)
        checks.fields(self, ("fewest_choices",), checks.integer, 1)
        checks.fields(self, ("is_causal", "is_balanced", "has_kernel", "needs_token_ids", "experts_choose",
                             "counts_preference"), checks.flag)
        if not callable(self.decide) and not (isinstance(self.decide, str) and ":" in self.decide):
            raise Refusal(f"The policy {self.name!r} decides by a function, or by its place as \"module:function\", "
                          f"not {checks.shown(self.decide)}.")
        if self.experts_choose and not (self.has_kernel and self.is_balanced):
            raise Refusal(f"In the policy {self.name!r} experts choose, by scores and each as many tokens as the "
                          "others; leave has_kernel=True and set is_balanced=True.")
        if self.counts_preference and not self.has_kernel:
            raise Refusal(f"The policy {self.name!r} has no scores that say what a token prefers; leave "
                          "has_kernel=True or counts_preference=False.")

    @property
    def function(self) -> Callable:
        """`decide`, imported if necessary."""
        return pkgutil.resolve_name(self.decide) if isinstance(self.decide, str) else self.decide

    @property
    def place(self) -> str:
        """Location of `decide`, "module:function"."""
        if isinstance(self.decide, str):
            return self.decide
        return f"{self.decide.__module__}:{getattr(self.decide, '__qualname__', self.decide)}"

    @property
    def can_be_sampled(self) -> bool:
        """Whether exploration="sample" applies: noise on the scores samples each token's expert."""
        return self.has_kernel and not self.experts_choose

    def count(self, num_selected_experts: int | None) -> int:
        """Returns the number of experts per token. None asks for the policy's default."""
        return num_selected_experts if num_selected_experts is not None else self.num_choices or 1


_policies: dict[str, Policy] = {}


def register(policy: Policy) -> Policy:
    """Makes a policy available by its name and returns it. Registering the same function again replaces it.

    Raises:
        Refusal: Another policy has that name.
    """
    if not isinstance(policy, Policy):
        raise Refusal(f"A policy is a policies.Policy, not {checks.shown(policy)}.")
    known = _policies.get(policy.name)
    if known is not None and known.place != policy.place:
        raise Refusal(f"There is a policy {policy.name!r} already, by {known.place}; give the one by "
                      f"{policy.place} another name.")
    _policies[policy.name] = policy
    return policy


def names() -> tuple[str, ...]:
    """Returns the names of all policies, in order of registration."""
    return tuple(_policies)


def get(name: str, argument: str = "routing_policy") -> Policy:
    """Returns the policy of that name.

    Args:
        name: str.
        argument: Name of the argument, for the error.

    Raises:
        Refusal: The name is unknown. Suggests the nearest one.
    """
    if not isinstance(name, str) or name not in _policies:
        listed = ", ".join(map(repr, _policies))
        raise Refusal(f"{argument} must be one of {listed}, or one that an imported module registers, not "
                      f"{checks.shown(name)}."
                      f"{nearest(name, _policies)}")
    return _policies[name]


def check_options(policy: Policy, num_selected_experts, num_experts, exploration, second_expert_policy,
                  second_expert_threshold) -> None:
    """Raises ValueError if a router's options do not fit its policy. `num_experts` 0 is a dense model."""
    if not isinstance(policy, Policy):
        raise Refusal(f"policy must be a policies.Policy, not {checks.shown(policy)}.")
    checks.integer("num_experts", num_experts, at_least=0)
    check_choice("exploration", exploration, EXPLORATIONS)
    check_choice("second_expert_policy", second_expert_policy, SECOND_EXPERT_POLICIES)
    checks.number("second_expert_threshold", second_expert_threshold, "in (0, 1)")
    count, fixed, fewest = policy.count(num_selected_experts), policy.num_choices, policy.fewest_choices
    checks.integer("num_selected_experts", count, at_least=1)
    if fixed is not None and count != fixed:
        raise Refusal(f"The {policy.name} policy selects {fixed} expert{'s' * (fixed > 1)} for each token, not "
                      f"{count!r}; leave num_selected_experts out, or use routing_policy='top_n'.")
    if count < fewest:
        raise Refusal(f"num_selected_experts must be an integer of at least {fewest} with "
                      f"routing_policy={policy.name!r}, not {num_selected_experts!r}.")
    if num_experts and count > num_experts:
        raise Refusal(f"A token cannot go to {count} of {num_experts} experts; use at least {count} experts or a "
                      "smaller num_selected_experts.")
    if exploration == "sample" and not policy.can_be_sampled:
        raise Refusal(f"exploration='sample' draws each token's expert, which the {policy.name} policy does not "
                      "choose by token; use exploration='input_jitter' or 'argmax'.")


for _policy in (
    Policy("switch", "switch_tf.layers.policy_functions:switch", is_causal=True),
    Policy("ntlb", "switch_tf.layers.policy_functions:ntlb", counts_preference=True),
    Policy("batch_prioritized", "switch_tf.layers.policy_functions:batch_prioritized", num_choices=None),
    Policy("top2", "switch_tf.layers.policy_functions:top_n", num_choices=2),
    Policy("top_n", "switch_tf.layers.policy_functions:top_n", num_choices=None, fewest_choices=2),
    Policy("expert_choice", "switch_tf.layers.policy_functions:expert_choice", is_balanced=True, experts_choose=True),
    Policy("hash", "switch_tf.layers.policy_functions:hashed", is_causal=True, is_balanced=True, has_kernel=False,
           needs_token_ids=True),
    Policy("sinkhorn", "switch_tf.layers.policy_functions:sinkhorn", is_balanced=True),
):
    register(_policy)
