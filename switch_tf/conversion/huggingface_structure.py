"""Structure of a Hugging Face model, read from the names of its tensors rather than from config.json."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# Name of the logits in checkpoints converted from T5X without a rule for them (switch-xxl-128, switch-c-2048).
T5X_LOGITS = "decoder.logits_dense.weight"

_MAX_LAYERS = 512  # of a stack; published T5s have 24

_LAYER = re.compile(r"(encoder|decoder)\.block\.(\d+)\.(layer\.\d+\.(?:mlp|DenseReluDense)\.(router|experts)?)?")


class Structure(NamedTuple):
    """Structure of a model. Dictionaries are by stack, "encoder" and "decoder".

    `num_layers`: highest layer index plus one.
    `sparse_layers`, `dense_layers`: indices of layers with experts, and with a plain feed-forward layer.
    `is_gated`: whether feed-forward layers have wi_0 and wi_1.
    `has_logits`: whether the logits have separate weights.
    `has_t5x_logits`: whether those weights have T5X's name.
    """

    num_layers: dict[str, int]
    sparse_layers: dict[str, set[int]]
    dense_layers: dict[str, set[int]]
    is_gated: bool
    has_logits: bool
    has_t5x_logits: bool


def read_structure(names: Iterable[str]) -> Structure:
    """Returns the structure of a model from the names of its tensors.

    Raises:
        Refusal: a layer below the last of its stack is missing, or a stack has more than 512 layers.
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
    for stack, indices in layers.items():
        _check_layers(stack, indices)
    num_layers = {stack: len(indices) for stack, indices in layers.items()}
    return Structure(num_layers, sparse, dense, is_gated=any(name.endswith(".wi_0.weight") for name in names),
                     has_logits=bool({"lm_head.weight", T5X_LOGITS} & names), has_t5x_logits=T5X_LOGITS in names)


def _check_layers(stack, indices):
    """Checks layer indices, as names of tensors alone decide the depth of the model."""
    if len(indices) > _MAX_LAYERS:
        raise Refusal(f"The checkpoint's {stack} has tensors of {len(indices)} layers, and at most {_MAX_LAYERS} are "
                      "read.")
    missing = next((layer for layer in range(len(indices)) if layer not in indices), None)
    if missing is not None:
        raise Refusal(f"The checkpoint has tensors of {stack} layer {max(indices)}, but none of {stack} layer "
                      f"{missing}; it is incomplete or damaged, so download it again.")


def sparse_layers(num_layers: int, step: int) -> tuple[int, ...]:
    """Returns the sparse layers of a stack by Hugging Face's rule."""
    return SwitchConfig(num_encoder_layers=num_layers, encoder_sparse_step=step, num_experts=1, expert_capacity=1,
                        semantics="hf").encoder_sparse_layers


def step_for(layers: tuple[int, ...], num_layers: int, preferred: int) -> int | None:
    """Returns a sparse step that makes exactly `layers` sparse, if possible `preferred`; None if there is none."""
    steps = (preferred, *range(num_layers + 1))
    return next((step for step in steps if sparse_layers(num_layers, step) == layers), None)
