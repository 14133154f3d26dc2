"""Choices of configurations and layers."""

import difflib
from collections.abc import Iterable
from typing import Any

from switch_tf.checks import shown
from switch_tf.refusals import Refusal

# "gelu" is exact; "geglu" (T5 1.1) has the tanh form of gelu.
GATED_ACTIVATIONS = ("geglu", "geglu_exact", "swiglu", "reglu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", *GATED_ACTIVATIONS)
DISPATCHES = ("auto", "einsum", "index", "ragged")
ROUTER_DTYPES = ("float32", "bfloat16")
EXPLORATIONS = ("input_jitter", "argmax", "input_dropout", "sample")
SECOND_EXPERT_POLICIES = ("random", "all", "none", "threshold")
EXPERT_SUBLAYERS = ("feed_forward", "attention", "feed_forward_and_attention")
TRAINABLE = ("all", "all_but_experts", "experts", "router", "decoder")
INITIAL_VARIABLES = ("all", "matching", "with_optimizer")
ON_FAILED_SAVE = ("stop", "continue")
ON_SIGUSR1 = ("stop", "save")
ATTENTION_EXPERT_DTYPES = ("float32", "auto")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuses a value that is not one of `choices`, and suggests the nearest."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise Refusal(f"{name} must be one of {listed}, not {shown(value)}.{nearest(value, choices)}")


def nearest(word: str | int, choices: Iterable[str]) -> str:
    """Returns a sentence that suggests the choice most like `word`, or ""."""
    matches = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
