"""Names of activations in Hugging Face's configurations and in switch_tf."""

import warnings

from switch_tf import checks
from switch_tf.configs.choices import GATED_ACTIVATIONS
from switch_tf.refusals import Refusal

# Their function -> our activation without and with a gate. Of several names, the one to write comes first.
_FUNCTIONS = {
    "relu": ("relu", "reglu"), "gelu": ("gelu", "geglu_exact"), "gelu_python": ("gelu", "geglu_exact"),
    "gelu_new": ("gelu_tanh", "geglu"), "gelu_pytorch_tanh": ("gelu_tanh", "geglu"), "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu")}


def of_t5(values: dict, is_gated: bool) -> str:
    """Returns the activation of a T5, given the `values` of its config.json and whether its layers are gated.

    Raises:
        Refusal: switch_tf lacks the activation, or it contradicts the tensors.
    """
    stated = values["feed_forward_proj"]
    words = stated.split("-") if isinstance(stated, str) else []
    # In transformers "gated-gelu" is the tanh form, and dense_act_fn takes precedence.
    function = values.get("dense_act_fn", "gelu_new" if stated == "gated-gelu" else words[-1] if words else None)
    says_gated = words[0] == "gated" if words else False
    is_well_formed = len(words) == 1 or (len(words) == 2 and says_gated)
    if not is_well_formed or not _is_known(function):
        key = "dense_act_fn" if is_well_formed and "dense_act_fn" in values else "feed_forward_proj"
        raise Refusal(f"{key} in config.json is {checks.shown(values[key])}, and switch_tf has the activations "
                      f"{', '.join(map(repr, _FUNCTIONS))}, each also with 'gated-' in front.")
    if says_gated != is_gated:
        raise Refusal(f"config.json says feed_forward_proj={stated!r}, but the feed-forward layers hold "
                      f"{_tensors(is_gated)}; correct the one that is wrong.")
    return _FUNCTIONS[function][is_gated]


def of_switch(values: dict, is_gated: bool) -> str:
    """Returns the activation of a Switch Transformer, with the arguments and errors of `of_t5`."""
    stated = values["dense_act_fn"]
    if stated != "gated-gelu" and not _is_known(stated):
        raise Refusal(f"dense_act_fn in config.json is {checks.shown(stated)}, and switch_tf has the activations "
                      f"{', '.join(map(repr, _FUNCTIONS))}, and 'gated-gelu'.")
    if not is_gated:
        if stated == "gated-gelu":
            raise Refusal(f"config.json says dense_act_fn={stated!r}, but the feed-forward layers hold "
                          f"{_tensors(is_gated)}; correct the one that is wrong.")
        return _FUNCTIONS[stated][False]
    if stated not in ("gated-gelu", "gelu_new"):
        warnings.warn(f"config.json says dense_act_fn={stated!r}, but the feed-forward layers hold "
                      f"{_tensors(is_gated)}: they are read as gated gelu, the only gated form of Switch Transformers.",
                      stacklevel=2)
    return "geglu"


def keys(activation: str) -> dict:
    """Returns the keys of a T5's config.json for one of our activations."""
    is_gated = activation in GATED_ACTIVATIONS
    function = next(theirs for theirs, ours in _FUNCTIONS.items() if activation in ours)
    short = "gelu" if function == "gelu_new" and is_gated else function
    return {"dense_act_fn": function, "is_gated_act": is_gated,
            "feed_forward_proj": f"gated-{short}" if is_gated else short}


def _is_known(function):
    return isinstance(function, str) and function in _FUNCTIONS


def _tensors(is_gated):
    return "wi_0 and wi_1" if is_gated else "wi"
