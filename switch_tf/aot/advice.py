"""Advice for a run that does not fit its chips."""

import math
from typing import TYPE_CHECKING, Any

from switch_tf.aot.estimate import needed
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig

if TYPE_CHECKING:
    from switch_tf.hardware.chips import Chip
    from switch_tf.partitioning.layout import Layout

# Share of the memory that advice may fill, because temporaries do not shrink quite in proportion.
ROOM = 0.9


def advice(answer: Any, config: SwitchConfig, layout: "Layout", settings: StepSettings, batch_size: int,
           chip: "Chip") -> list[str]:
    """Returns a line for each measure, with numbers if they can be computed.

    Args:
        answer: Estimate that does not fit.
        config: Configuration of the model.
        layout: Layout with a complete mesh.
        settings: Settings of the step.
        batch_size: Sequences of the whole batch.
        chip: Chip of the topology.
    """
    lines = []
    kept, temporaries = answer.memory["weights"] + answer.memory["slots"], answer.memory["temporaries"]
    stored = kept + answer.memory["gradients"]
    if answer.refused is None:
        lines.append(f"{_gib(needed(answer.memory) - chip.memory)} a chip are missing: weights, slots and gradients "
                     f"take {_gib(stored)}, activations and temporaries {_gib(temporaries)}, of {_gib(chip.memory)}.")
        if len(answer.compiled) > 1 and stored < chip.memory:
            lines.append("Compile all layers: the compiler may keep less of each than of the few that this is "
                         "extrapolated from, for which it has room: --full.")
    if kept > chip.memory / 2:
        lines.append(f"Weights and slots are {_gib(answer.state)} in all, {_gib(answer.state / layout.num_devices)} a "
                     "chip where all are split over all (gin/layouts/fully_sharded_model.gin); "
                     f"{math.ceil(2 * answer.state / chip.memory)} chips hold them in half of their memory.")
    if not config.remat:
        lines.append("Recompute activations in the backward pass, for about a third more compute: "
                     "--gin.SwitchConfig.remat=True.")
    if parts := _microbatches(stored, temporaries, layout, settings, batch_size, chip):
        multiple = math.lcm(config.num_groups_multiple, parts * layout.num_pieces("group"))
        groups = f" --gin.SwitchConfig.num_groups_multiple={multiple}" if (
            config.num_experts and multiple != config.num_groups_multiple) else ""
        lines.append(f"Process the batch in parts, about {_gib(temporaries * settings.num_microbatches / parts)} of "
                     f"activations and temporaries each: --gin.StepSettings.num_microbatches={parts}{groups}.")
        lines.append(f"Or take a smaller batch: --gin.BATCH_SIZE={batch_size * settings.num_microbatches // parts}.")
    return lines


def _microbatches(stored, temporaries, layout, settings, batch_size, chip):
    """Returns the least number of parts, doubling the present one, with room for activations, or None."""
    parts = 2 * settings.num_microbatches
    while batch_size % (parts * layout.num_pieces("batch")) == 0:
        if stored + temporaries * settings.num_microbatches / parts <= ROOM * chip.memory:
            return parts
        parts *= 2
    return None


def _gib(size):
    return f"{size / 2**30:.2f} GiB"
