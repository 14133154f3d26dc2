"""One question to the compiler, "does this run fit this pod, and what does it cost", and its answer in numbers."""

import dataclasses
import math
import time
from typing import NamedTuple

from switch_tf.aot import report
from switch_tf.aot.compile import DoesNotFit, compile_step
from switch_tf.aot.lower import lower_step
from switch_tf.partitioning.collectives import summarize


class Answer(NamedTuple):
    """For one chip: `memory` in bytes by kind, `collectives` (kind -> count and bytes), `flops`, `bytes_accessed` and
    `link_bytes` of a step; `sent`: what the deepest model that was compiled sends, one by one; `compiled`: the depths
    that were compiled; `refused`: the compiler's words where it found no room, else None."""

    memory: dict[str, int]
    collectives: dict[str, dict[str, int]]
    flops: float
    bytes_accessed: float
    link_bytes: float
    sent: list
    compiled: list[tuple[int, int]]
    refused: str | None


def ask(make_model, make_optimizer, layout, topology, batch_size, task_feature_lengths, settings, is_full=False,
        say=lambda text: None, save=lambda depth, lowered, compiled: None) -> Answer:
    """Compiles a step, whole or at two shallow depths from which the rest is extrapolated linearly.

    Args:
        make_model: function of the numbers of encoder and decoder layers (None: its own) to a model that is not built.
        make_optimizer: function to an optimizer that is not built.
        layout, batch_size, task_feature_lengths, settings: see `lower_step`.
        topology: str, such as "v5e:4x4".
        is_full: bool. Compile all layers.
        say: function of a line of text.
        save: function of a depth, a Lowered and a Compiled, called for each.
    """
    config = make_model(None, None).config
    depths = [(config.num_encoder_layers, config.num_decoder_layers)] if is_full else shallow_depths(config)
    points = []
    for depth in depths:
        started = time.perf_counter()
        say(f"Lowering {depth[0]} + {depth[1]} layers ...")
        lowered = lower_step(make_model(*depth), make_optimizer(), layout, batch_size, task_feature_lengths, settings)
        say(f"... {time.perf_counter() - started:.0f} s; compiling for {topology} ...")
        try:
            compiled = compile_step(lowered, topology)
        except DoesNotFit as error:
            return Answer({}, {}, 0.0, 0.0, 0.0, [], [depth], str(error))
        say(f"... {compiled.seconds:.0f} s.")
        save(depth, lowered, compiled)
        sent = report.collectives(compiled.hlo, layout.mesh)
        points.append((compiled, sent))
    return _answer(config, depths, points)


def shallow_depths(config) -> list[tuple[int, int]]:
    """One and two periods of dense and sparse layers; the model's own depth where it is not a multiple of that."""
    steps = [step if config.num_experts else 1 for step in (config.encoder_sparse_step, config.decoder_sparse_step)]
    layers = (config.num_encoder_layers, config.num_decoder_layers)
    period = tuple(max(step, 1) if count else 0 for step, count in zip(steps, layers, strict=True))
    periods = {count / length for count, length in zip(layers, period, strict=True) if length}
    if len(periods) != 1 or not (whole := periods.pop()).is_integer() or whole <= 2:
        return [layers]
    return [period, tuple(2 * length for length in period)]


def _answer(config, depths, points):
    """Extrapolates from two depths: value(n) = first + (n - 1) (second - first), n in periods."""
    num_periods = 1.0
    if len(depths) == 2:
        unit = max(depths[0])
        num_periods = max(config.num_encoder_layers, config.num_decoder_layers) / unit

    def extend(values):
        first, last = values[0], values[-1]
        return first + (num_periods - 1) * (last - first)

    summaries = [summarize(sent) for _, sent in points]
    kinds = sorted(set().union(*summaries))
    nothing = {"count": 0, "bytes": 0}
    return Answer(
        memory={kind: round(extend([compiled.memory[kind] for compiled, _ in points])) for kind in points[0][0].memory},
        collectives={kind: {unit: round(extend([summary.get(kind, nothing)[unit] for summary in summaries]))
                            for unit in nothing} for kind in kinds},
        flops=extend([compiled.flops for compiled, _ in points]),
        bytes_accessed=extend([compiled.bytes_accessed for compiled, _ in points]),
        link_bytes=extend([report.link_bytes(sent) for _, sent in points]),
        sent=points[-1][1], compiled=depths, refused=None)


def needed(memory: dict[str, int]) -> int:
    """Bytes that one chip must have for a step."""
    return (memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"])


def advice(answer: Answer, config, settings, chip: report.Chip, state_bytes: int, num_devices: int) -> list[str]:
    """What would help a run that does not fit, with numbers where they follow; `state_bytes`: weights and slots."""
    lines = []
    if answer.refused is None:
        state, temporaries = answer.memory["arguments"], answer.memory["temporaries"]
        lines.append(f"Weights and slots take {_gib(state)} of {_gib(chip.memory)} on each chip, activations and "
                     f"temporaries {_gib(temporaries)}.")
        if state > chip.memory / 2:
            lines.append(f"Split weights further: all of them and their slots are {_gib(state_bytes)}, so that "
                         f"{_gib(state_bytes / num_devices)} a chip is the least here (gin/layouts/fully_sharded.gin), "
                         f"and {math.ceil(2 * state_bytes / chip.memory)} chips hold them in half of their memory.")
    if not config.remat:
        lines.append("Recompute activations: --gin.SwitchConfig.remat=True.")
    lines.append(f"Process the batch in parts: --gin.StepSettings.num_microbatches={2 * settings.num_microbatches}, "
                 "which halves the activations.")
    return lines


def _gib(size):
    return f"{size / 2**30:.2f} GiB"


def shallower(config, num_encoder_layers, num_decoder_layers):
    """The configuration with other numbers of layers; None keeps its own."""
    if num_encoder_layers is None:
        return config
    return dataclasses.replace(config, num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers)
