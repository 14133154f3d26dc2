"""Choices of configurations and layers, and rules of their fields and arguments."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from switch_tf import checks
from switch_tf.refusals import Refusal

# "gelu" is exact; "geglu" (T5 1.1) has the tanh form of gelu.
GATED_ACTIVATIONS = ("geglu", "geglu_exact", "swiglu", "reglu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", *GATED_ACTIVATIONS)
DISPATCHES = ("auto", "einsum", "index", "ragged")
SECOND_EXPERT_POLICIES = ("random", "all", "none", "threshold")


def by_name(names_by_value: dict[Any, str]) -> dict[str, Any]:
    """Returns {name: value} for {value: "name name ..."}."""
    return {name: value for value, names in names_by_value.items() for name in names.split()}


# Field of a model, a group or a layer -> its rule, as `check` reads it.
RULES = by_name({
    4: "relative_attention_num_buckets",
    1: "num_experts vocab_size d_model d_ff d_kv num_heads num_encoder_layers relative_attention_max_distance "
       "num_selected_experts expert_d_ff group_size num_groups_multiple min_expert_capacity",
    0: "num_decoder_layers encoder_sparse_step decoder_sparse_step",
    "in [0, 1)": "dropout_rate expert_dropout_rate jitter_noise",
    "in (0, 1)": "second_expert_threshold threshold",
    "above 0": "epsilon layer_norm_epsilon init_scale attention_init_scale",
    "0 or above": "load_balancing_loss_weight router_z_loss_weight second_place_loss_weight",
    "in [1e-6, 1e6]": "train_capacity_factor eval_capacity_factor",
    checks.flag: "logits_via_embedding relative_attention_per_layer allow_non_causal_decoder extra_mlp remat "
                 "scale_decoder_outputs is_bidirectional",
    ACTIVATIONS: "activation", DISPATCHES: "dispatch", SECOND_EXPERT_POLICIES: "second_expert_policy second_expert",
    ("input_jitter", "argmax", "input_dropout", "sample"): "exploration",
    ("float32", "bfloat16"): "router_dtype", ("float32", "auto"): "attention_expert_dtype",
    ("feed_forward", "attention", "feed_forward_and_attention"): "expert_sublayers"})


def check(name: str, value: Any, rule: Any) -> Any:
    """Checks and returns a value.

    `rule`: The smallest integer, the words of `checks.number`, choices, or a check such as `checks.flag`.
    """
    match rule:
        case int():
            return checks.integer(name, value, rule)
        case str():
            return checks.number(name, value, rule)
        case tuple():
            check_choice(name, value, rule)
            return value
    return rule(name, value)


def check_fields(record: Any, rules: dict[str, Any], label: Callable[[str], str] = str) -> None:
    """Replaces the fields of a frozen dataclass that have a rule by their checked values. A default None stays."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in rules and not (value is None and field.default is None):
            object.__setattr__(record, field.name, check(label(field.name), value, rules[field.name]))


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuses a value that is not one of `choices`, and suggests the nearest."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise Refusal(f"{name} must be one of {listed}, not {checks.shown(value)}.{nearest(value, choices)}")


def nearest(word: str | int, choices: Iterable[str], likeness: float = 0.6) -> str:
    """Returns a sentence that suggests the choice most like `word`, or ""."""
    matches = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=likeness)
    return f" Did you mean {matches[0]!r}?" if matches else ""
