"""Warnings about a partitioned program: gathered experts, experts computed on every chip, loops of unknown length."""

import math
from typing import TYPE_CHECKING

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import grouping

if TYPE_CHECKING:
    from switch_tf.aot.program import InTurn, Program
    from switch_tf.partitioning.layout import Layout

# Rows are padded to the tiles of a chip, so that sizes exceed a chip's share somewhat.
TOLERANCE = 1.5


def find(
        program: "Program | InTurn", config: SwitchConfig, layout: "Layout", batch_size: int,
        task_feature_lengths: dict, num_microbatches: int) -> list[str]:
    """Returns a sentence for each warning.

    Args:
        program: Program of the step.
        config: Configuration of the model.
        layout: Layout with a complete mesh.
        batch_size: Sequences of the whole batch.
        task_feature_lengths: "inputs" and "targets", in tokens.
        num_microbatches: Number of parts of the batch.
    """
    warnings = [f"the loop {loop} does not say how often it runs and is counted once, so that FLOPs, traffic and "
                "collectives are too low" for loop in program.unread_loops]
    if config.num_experts:
        warnings += _gathered(program, config)
        warnings += _replicated(program, config, layout, batch_size // num_microbatches, task_feature_lengths)
    return warnings


def _gathered(program, config):
    stacked = {",".join(map(str, weight.shape)) for weight in config.weights() if "expert" in weight.axes}
    return [f"{one.kind} of {one.shape} in {one.where}: the weights of all experts are brought together on each chip"
            for one in program.collectives
            if one.kind == "all-gather" and one.shape.partition("[")[2].rstrip("]") in stacked]


def _replicated(program, config, layout, batch_size, lengths):
    """Compares the largest product of activations with a chip's share of the expected one."""
    slots = max(_slots(batch_size, lengths[feature], config) for feature, layers in (
        ("inputs", config.encoder_sparse_layers), ("targets", config.decoder_sparse_layers)) if layers)
    gradients = {math.prod(layout.piece(weight.shape, layout.spec(weight.axes)))
                 for weight in config.weights() if "expert" in weight.axes}
    inner = config.num_heads * config.d_kv if config.has_attention_experts else 0
    width = max(config.d_model, inner, config.expert_width // layout.num_pieces("expert_mlp"))
    share = slots // layout.num_pieces("batch") * width
    largest = max((size for size in program.expert_products() if size not in gradients), default=0)
    if largest <= TOLERANCE * share:
        return []
    return [f"a product of the experts makes {largest:,} numbers on each chip, where its share is {share:,}: tokens "
            "are computed on several chips at once; the layout should split group, as it does batch"]


def _slots(num_sequences, length, config):
    """Counts the rows of all experts' buffers."""
    plan = grouping.plan(config.grouping, (num_sequences, length), training=True)
    return config.num_experts * plan.groups.count * plan.capacity
