"""The words that configurations and layers choose from, and the sentences that refuse any other."""

import difflib

ACTIVATIONS = ("relu", "geglu")
SEMANTICS = ("switch_tf", "mtf", "t5x", "hf")
DISPATCHES = ("auto", "einsum", "index", "ragged")
ROUTER_DTYPES = ("float32", "bfloat16")
BACKENDS = ("auto", "dtensor", "one_device", "mirrored", "multi_worker_mirrored", "tpu")
ROUTING_POLICIES = ("switch", "ntlb", "batch_prioritized", "top2", "top_n", "expert_choice", "hash", "sinkhorn")
# In the others a later token can take an earlier one's place or change its expert.
CAUSAL_POLICIES = ("switch", "hash")
EXPLORATIONS = ("input_jitter", "argmax", "input_dropout", "sample")
SECOND_EXPERT_POLICIES = ("random", "all", "none", "threshold")
EXPERT_SUBLAYERS = ("feed_forward", "attention", "feed_forward_and_attention")
ATTENTION_EXPERT_DTYPES = ("float32", "auto")


def num_choices(policy: str, num_selected_experts: int | None) -> int:
    """Experts that a policy sends each token to."""
    if num_selected_experts is not None:
        return num_selected_experts
    return 2 if policy == "top2" else 1


def check_routing(policy, num_selected_experts, num_experts, exploration, second_expert_policy,
                  second_expert_threshold) -> None:
    """Refuses a routing policy whose options do not fit it; `num_experts` 0 is a model without experts."""
    check_choice("routing_policy", policy, ROUTING_POLICIES)
    check_choice("exploration", exploration, EXPLORATIONS)
    check_choice("second_expert_policy", second_expert_policy, SECOND_EXPERT_POLICIES)
    if not 0 < second_expert_threshold < 1:
        raise ValueError(f"second_expert_threshold must be in (0, 1), not {second_expert_threshold!r}.")
    count = num_choices(policy, num_selected_experts)
    fixed = {"top2": 2, "top_n": None, "batch_prioritized": None}.get(policy, 1)
    if fixed is not None and count != fixed:
        raise ValueError(f"The {policy} policy selects {fixed} expert{'s' * (fixed > 1)} for each token, not "
                         f"{count!r}; leave num_selected_experts out, or use routing_policy='top_n'.")
    if isinstance(count, bool) or not isinstance(count, int) or count < (2 if policy == "top_n" else 1):
        raise ValueError(f"num_selected_experts must be an integer of at least {2 if policy == 'top_n' else 1} with "
                         f"routing_policy={policy!r}, not {num_selected_experts!r}.")
    if num_experts and count > num_experts:
        raise ValueError(f"A token cannot go to {count} of {num_experts} experts; use at least {count} experts or a "
                         "smaller num_selected_experts.")
    if exploration == "sample" and policy in ("expert_choice", "hash"):
        raise ValueError(f"exploration='sample' draws each token's expert, which the {policy} policy does not choose "
                         "by token; use exploration='input_jitter' or 'argmax'.")


def check_choice(name: str, value, choices) -> None:
    """Refuses a value that is not one of `choices`, naming the nearest one."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, not {value!r}.{nearest(value, choices)}")


def nearest(word, choices) -> str:
    """A sentence that names the choice most like `word`, or nothing."""
    matches = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
