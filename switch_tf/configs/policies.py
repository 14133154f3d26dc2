"""Routing policies, one record each: a function and its properties.

Configurations import no Keras, so a record may locate its function by name.
"""

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from switch_tf import checks
from switch_tf.configs.choices import RULES, by_name, check_fields, nearest
from switch_tf.refusals import Refusal


class RouterWeight(NamedTuple):
    """A weight that each router trains for its policy. With two dimensions or more it counts as a product per token.

    Attributes:
        shape: tuple of int, of one dimension or more: (1,) for a number.
        axes: Logical axis of each dimension: "embed" for d_model, "router_expert" for experts, None for any other.
        initial: float, its first value, or None for the distribution of the router's kernel, with variance
            `Router.init_scale` / shape[0].
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initial: float | None = 0.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Assignment of tokens to experts. `register` makes it available by name.

    Args:
        decide: Function of `(scores, options)`, see `layers.decisions`, or "module:function", imported at the first
            call. Returns TokenChoices, or ExpertChoices if `experts_choose`.
        num_choices: Experts per token. None for `num_selected_experts`.
        fewest_choices: Smallest valid `num_selected_experts`.
        is_causal: Whether later tokens never change the expert or slot of earlier ones. Required in decoders.
        is_balanced: Whether experts get equal shares without a load-balancing loss.
        has_kernel: Whether the router's logits are the inputs times a kernel [d_model, expert].
        needs_token_ids: Whether `scores.token_ids` is required.
        experts_choose: Whether experts choose tokens.
        counts_preference: Whether statistics and balance loss count a token's highest-scoring expert, not the chosen
            one.
        state: Names of vectors that the router keeps in `options.state`, <float32>[expert], initially zero.
        update: Function of `(policy, state, load)`, or "module:function". Returns the state after a training step.
            `state` is a dict, `load` <float32>[expert], the share of tokens by first choice.
        score: Function of `(policy, inputs, logits, weights)`, or "module:function". Returns the logits, <router
            dtype>[group, tokens, expert]. `inputs` are <router dtype>[group, tokens, d_model], after exploration,
            `logits` the kernel's or None, `weights` a dict of tensors. Without kernel and `score`, `scores.selection`
            and `scores.probs` are None.
        weights: Function of `(policy, d_model, num_experts)`, or "module:function". Returns name -> RouterWeight, what
            the router trains for `score`.

    A subclass adds parameters as fields. `decide` reads them in `options.policy`.
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
    state: tuple[str, ...] = ()
    update: Callable | str | None = None
    score: Callable | str | None = None
    weights: Callable | str | None = None

    def __post_init__(self):
        check_fields(self, by_name({
            checks.text: "name", 1: "fewest_choices",
            checks.flag: "is_causal is_balanced has_kernel needs_token_ids experts_choose counts_preference"}))
        checks.fields(self, ("num_choices",), checks.optional, checks.integer, 1)
        if not isinstance(self.state, tuple) or not all(isinstance(name, str) for name in self.state):
            raise Refusal(f"state must be a tuple of names, not {checks.shown(self.state)}.")
        for is_given, function, rule in (
                (True, self.decide, f"The policy {self.name!r} decides by a function, or by its place"),
                (self.state, self.update, f"The policy {self.name!r} keeps a state, so update must be a function, or "
                                          "its place"),
                *((value is not None, value, f"{name} of the policy {self.name!r} must be a function, or its place")
                  for name, value in (("score", self.score), ("weights", self.weights)))):
            if is_given and not (callable(function) or isinstance(function, str) and ":" in function):
                raise Refusal(f'{rule} as "module:function", not {checks.shown(function)}.')
        if self.weights and not self.score:
            raise Refusal(f"The policy {self.name!r} has weights and no score that uses them, so nothing would train "
                          "them; give it a score.")
        if self.experts_choose and not (self.has_scores and self.is_balanced):
            raise Refusal(f"In the policy {self.name!r} experts choose, by scores and each as many tokens as the "
                          "others; leave has_kernel=True and set is_balanced=True.")
        if self.counts_preference and not self.has_scores:
            raise Refusal(f"The policy {self.name!r} has no scores that say what a token prefers; leave "
                          "has_kernel=True or counts_preference=False.")

    @property
    def has_scores(self) -> bool:
        """Whether the router learns scores of experts."""
        return self.has_kernel or self.score is not None

    def router_weights(self, d_model: int, num_experts: int) -> dict[str, RouterWeight]:
        """Returns every weight that a router trains, with its kernel, by name."""
        kernel = {"kernel": RouterWeight((d_model, num_experts), ("embed", "router_expert"), None)}
        declared = imported(self.weights)(self, d_model, num_experts) if self.weights else {}
        if taken := declared.keys() & {"kernel", *self.state}:
            raise Refusal(f"The policy {self.name!r} has a weight {min(taken)!r}, the name of the router's kernel or "
                          "of a state; give it another name.")
        for name, (shape, axes, _) in declared.items():
            if not shape or len(axes) != len(shape):
                raise Refusal(f"The weight {name!r} of the policy {self.name!r} has the shape {tuple(shape)} and the "
                              f"axes {tuple(axes)}; it needs one dimension or more, (1,) for a number, and an axis for "
                              "each.")
        return (kernel if self.has_kernel else {}) | declared

    @property
    def place(self) -> str:
        """Location of `decide`, "module:function"."""
        if isinstance(self.decide, str):
            return self.decide
        return f"{self.decide.__module__}:{getattr(self.decide, '__qualname__', self.decide)}"

    def count(self, num_selected_experts: int | None) -> int:
        """Returns the number of experts per token. None means the default."""
        return num_selected_experts if num_selected_experts is not None else self.num_choices or 1


def imported(function: Any) -> Callable:
    """Returns a function, imported if it is a place, "module:function"."""
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


@dataclasses.dataclass(frozen=True)
class TopN(Policy):
    """GShard's gating for `num_selected_experts` choices (arXiv 2006.16668, algorithm 1).

    Args:
        second_expert: Later choices to carry out: "random", "all", "none" or "threshold". "random" keeps a choice with
            probability gate / threshold in training, and always at inference.
        threshold: In (0, 1).
    """

    name: str = "top_n"
    decide: Callable | str = "switch_tf.layers.policy_functions:top_n"
    num_choices: int | None = None
    fewest_choices: int = 2
    second_expert: str = "random"
    threshold: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        check_fields(self, RULES)


@dataclasses.dataclass(frozen=True)
class Top2(TopN):
    """`TopN` with two choices."""

    name: str = "top2"
    num_choices: int | None = 2
    fewest_choices: int = 1


_policies: dict[str, Policy] = {}


def register(policy: Policy) -> Policy:
    """Makes a policy available by name and returns it. The same function may be registered again."""
    if not isinstance(policy, Policy):
        raise Refusal(f"A policy is a policies.Policy, not {checks.shown(policy)}.")
    registered = _policies.get(policy.name)
    if registered is not None and registered.place != policy.place:
        raise Refusal(f"There is a policy {policy.name!r} already, by {registered.place}; give the one by "
                      f"{policy.place} another name.")
    _policies[policy.name] = policy
    return policy


def names() -> tuple[str, ...]:
    """Returns all names, in order of registration."""
    return tuple(_policies)


def get(name: str, argument: str = "routing_policy") -> Policy:
    """Returns the policy of that name. Errors name `argument`."""
    if not isinstance(name, str) or name not in _policies:
        listed = ", ".join(map(repr, _policies))
        raise Refusal(f"{argument} must be one of {listed}, or one that an imported module registers, not "
                      f"{checks.shown(name)}.{nearest(name, _policies)}")
    return _policies[name]


def resolve(policy: str | Policy, second_expert_policy: str, second_expert_threshold: float) -> Policy:
    """Returns the record of a router's policy.

    Args:
        policy: Name, or a record with the name of a registered policy.
        second_expert_policy, second_expert_threshold: Fields of "top2" and "top_n" given by name.
    """
    registered = get(policy.name if isinstance(policy, Policy) else policy, "policy")
    if isinstance(policy, Policy):
        if type(registered) is not type(policy) or registered.place != policy.place:
            raise Refusal(f"There is a policy {policy.name!r} already, by {registered.place}; register the one by "
                          f"{policy.place} under another name.")
        if (second_expert_policy, second_expert_threshold) != ("random", 0.2):
            raise Refusal(f"second_expert_policy={second_expert_policy!r} and "
                          f"second_expert_threshold={second_expert_threshold!r} go with the name of a policy; give "
                          "them to the record, as in policies.Top2(second_expert='all').")
        return policy
    changes: dict[str, Any] = {"second_expert": second_expert_policy, "threshold": second_expert_threshold}
    return dataclasses.replace(registered, **changes) if policy in ("top2", "top_n") else registered


def check_options(policy: Policy, num_selected_experts: int, num_experts: int, exploration: str) -> None:
    """Refuses router options that do not fit the policy. Each is valid by itself; `num_experts` may be 0."""
    count, fixed, fewest = policy.count(num_selected_experts), policy.num_choices, policy.fewest_choices
    if fixed is not None and count != fixed:
        raise Refusal(f"The {policy.name} policy selects {fixed} expert{'s' * (fixed > 1)} for each token, not "
                      f"{count!r}; leave num_selected_experts out, or use routing_policy='top_n'.")
    if count < fewest:
        raise Refusal(f"num_selected_experts must be an integer of at least {fewest} with "
                      f"routing_policy={policy.name!r}, not {num_selected_experts!r}.")
    if num_experts and count > num_experts:
        raise Refusal(f"A token cannot go to {count} of {num_experts} experts; use at least {count} experts or a "
                      "smaller num_selected_experts.")
    if exploration == "sample" and (policy.experts_choose or not policy.has_scores):
        raise Refusal(f"exploration='sample' draws each token's expert, which the {policy.name} policy does not "
                      "choose by token; use exploration='input_jitter' or 'argmax'.")


for _policy in (
    Policy("switch", "switch_tf.layers.policy_functions:switch", is_causal=True),
    Policy("ntlb", "switch_tf.layers.policy_functions:ntlb", counts_preference=True),
    Policy("batch_prioritized", "switch_tf.layers.policy_functions:batch_prioritized", num_choices=None),
    Top2(),
    TopN(),
    Policy("expert_choice", "switch_tf.layers.policy_functions:expert_choice", is_balanced=True, experts_choose=True),
    Policy("hash", "switch_tf.layers.policy_functions:hashed", is_causal=True, is_balanced=True, has_kernel=False,
           needs_token_ids=True),
    Policy("sinkhorn", "switch_tf.layers.policy_functions:sinkhorn", is_balanced=True),
):
    register(_policy)
