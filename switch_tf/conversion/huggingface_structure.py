"""What the names of a Hugging Face checkpoint's tensors show of its model, whatever its config.json says."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# The logits of checkpoints that were renamed from T5X by rules without one for them (switch-xxl-128, switch-c-2048).
T5X_LOGITS = "decoder.logits_dense.weight"

_MAX_LAYERS = 512  # of a stack; published T5s have 24

_LAYER = re.compile(r"(encoder|decoder)\.block\.(\d+)\.(layer\.\d+\.(?:mlp|DenseReluDense)\.(router|experts)?)?")


class Structure(NamedTuple):
    """The facts that names show.

    `num_layers`: of each stack, the highest layer index plus one.
    `sparse_layers`, `dense_layers`: of each stack, the layers with experts, and with a plain feed-forward layer.
    `is_gated`: whether feed-forward layers hold wi_0 and wi_1.
    `has_logits`, `has_t5x_logits`: whether the logits have weights of their own, and those under T5X's name.
    """

    num_layers: dict[str, int]
    sparse_layers: dict[str, set[int]]
    dense_layers: dict[str, set[int]]
    is_gated: bool
    has_logits: bool
    has_t5x_logits: bool


def read_structure(names: Iterable[str]) -> Structure:
    """Reads the structure of a model off the names of its tensors.

    Raises:
        Refusal: a stack lacks a layer below its last, or has more layers than any model.
    """
    names = set(names)
    layers: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    sparse: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    dense: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    for name in names:
        if match := _LAYER.match(name):
            stack, layer, is_feed_forward, is_sparse = match[1], int(match[2]), match[3], match[4]
            layers[stack].add(layer)
            if is_feed_forward:
                (sparse if is_sparse else dense)[stack].add(layer)
    for stack, found in layers.items():
        _check_layers(stack, found)
    num_layers = {stack: len(found) for stack, found in layers.items()}
    return Structure(num_layers, sparse, dense, is_gated=any(name.endswith(".wi_0.weight") for name in names),
                     has_logits=bool({"lm_head.weight", T5X_LOGITS} & names), has_t5x_logits=T5X_LOGITS in names)


def _check_layers(stack, found):
    """A model is as deep as its tensors say, so that their indices must not be taken on trust."""
    if len(found) > _MAX_LAYERS:
        raise Refusal(f"The checkpoint's {stack} has tensors of {len(found)} layers, and at most {_MAX_LAYERS} are "
                      "read.")
    missing = next((layer for layer in range(len(found)) if layer not in found), None)
    if missing is not None:
        raise Refusal(f"The checkpoint has tensors of {stack} layer {max(found)}, but none of {stack} layer "
                      f"{missing}; it is incomplete or damaged. Download it again.")


def sparse_layers(num_layers: int, step: int) -> tuple[int, ...]:
    """The sparse layers of a stack by Hugging Face's rule."""
    return SwitchConfig(num_encoder_layers=num_layers, encoder_sparse_step=step, num_experts=1, expert_capacity=1,
                        semantics="hf").encoder_sparse_layers


def step_for(layers: tuple[int, ...], num_layers: int, preferred: int) -> int | None:
    """A sparse step that makes exactly `layers` sparse, `preferred` if it does; None if there is none."""
    steps = (preferred, *range(num_layers + 1))
    return next((step for step in steps if sparse_layers(num_layers, step) == layers), None)
