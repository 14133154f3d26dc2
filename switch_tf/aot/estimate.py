"""Estimates memory, collectives and time of a training step from its compiled program."""

import contextlib
import dataclasses
import math
import pathlib
import threading
import time
from typing import NamedTuple

import tensorflow as tf

from switch_tf.aot.clock import Schedule
from switch_tf.aot.compiler import DoesNotFit, compile_step
from switch_tf.aot.lower import lower_step
from switch_tf.aot.program import Program, Roofline
from switch_tf.configs import accounting
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips, devices
from switch_tf.layers import grouping
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.collectives import summarize
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.storage.outputs import say
from switch_tf.training.train_step import check_division

REPORT_PERIOD = 20  # seconds
# Memory grows evenly with more layers. With fewer, the compiler keeps more.
FEWEST_LAYERS = 4
# For the first depth, between a busy and an idle machine's speed. The second depth uses the measured speed.
LINES_PER_SECOND = {"TPU": 250, "GPU": 1500}
# Share of the memory to fill: temporaries shrink less than in proportion.
ROOM = 0.9
# Rows are padded to a chip's tiles, so sizes exceed its share.
TOLERANCE = 1.5
NUM_LARGEST = 8  # collectives


class Estimate(NamedTuple):
    """Needs of one chip for a step.

    Attributes:
        memory: Bytes by kind: as in `Compiled`, and "weights", "slots" and "gradients" (0: they are temporaries).
        state: Bytes of all weights and slots on all chips.
        compiled: Depths.
        files: Name -> text, one complete step per file.
        refused: The compiler's message if it found no room. Then only the values above exist.
        collectives: Kind -> count and bytes in a step.
        roofline: Least seconds of a step.
        parts: Predicted seconds of a step, by part of the model.
        program, schedule: Of the deepest compiled model.
    """

    memory: dict[str, int]
    state: int
    compiled: list[tuple[int, int]]
    files: dict[str, str]
    refused: str | None = None
    collectives: dict[str, dict[str, int]] = {}
    flops: float = 0.0
    roofline: Roofline = Roofline(0.0, 0.0, 0.0)
    parts: dict[str, float] = {}
    program: Program | None = None
    schedule: Schedule | None = None


def answer(experiment: Experiment, topology: str, is_full: bool, save: str | None,
           plot: str | None) -> tuple[dict, dict[pathlib.Path, str | bytes]]:
    """Returns the JSON object of an estimate, and the requested files: programs in `save`, a picture at `plot`."""
    estimate = make(experiment, topology, is_full)
    result = as_json(experiment, topology, chips.find_chip(topology), estimate)
    files: dict[pathlib.Path, str | bytes] = {}
    if save is not None:
        files |= {places.at(save) / name: text for name, text in estimate.files.items()}
    if plot is not None and estimate.schedule is not None:
        files[places.at(plot)] = estimate.schedule.draw(estimate.parts, estimate.compiled[-1], result["layers"])
    return result, files


def make(experiment: Experiment, topology: str, is_full: bool = False) -> Estimate:
    """Compiles a step, whole (`is_full`) or at two shallow depths, and extrapolates linearly. Prints its progress.

    The experiment's layout has a complete mesh.
    """
    config, layout, run, settings = experiment.config, experiment.layout, experiment.run, experiment.settings
    check_division(config, layout, run.batch_size, run.task_feature_lengths, settings.num_microbatches)
    if settings.steps_per_call != 1:
        raise Refusal(f"One step is compiled, so steps_per_call must be 1, not {settings.steps_per_call}.")
    chip, kind = chips.find_chip(topology), chips.kind(topology)
    lines_per_second = LINES_PER_SECOND[kind]
    dtype = experiment.make_model().dtype_policy
    points, files = [], {}
    for depth in [(config.num_encoder_layers, config.num_decoder_layers)] if is_full else shallow_depths(config):
        started = time.perf_counter()
        say(f"Lowering {depth[0]} + {depth[1]} layers ...")
        model = SwitchTransformer(dataclasses.replace(config, num_encoder_layers=depth[0], num_decoder_layers=depth[1]),
                                  dtype=dtype)
        with devices.supposed(kind, topology):
            lowered = lower_step(model, experiment.make_optimizer(), layout, run.batch_size, run.task_feature_lengths,
                                 settings, run.pack, experiment.make_objective())
        text = lowered.text
        num_lines = text.count("\n")
        expected = num_lines / lines_per_second
        say(f"... {time.perf_counter() - started:.0f} s; compiling for {topology}, about {expected:.0f} s ...")
        kept = {f"{kind}s": _bytes(lowered, kind, layout.piece) for kind in ("weight", "slot")} | {"gradients": 0}
        state = sum(_bytes(lowered, kind, lambda shape, spec: shape) for kind in ("weight", "slot"))
        started = time.perf_counter()
        try:
            with _progress(expected):
                compiled = compile_step(lowered, topology)
        except DoesNotFit as error:
            return Estimate({**kept, "temporaries": error.temporaries}, state, [depth], files, str(error))
        seconds = time.perf_counter() - started
        lines_per_second = num_lines / seconds
        program = Program(compiled.hlo, layout.mesh)
        schedule = program.schedule(chip, compiled.network)
        memory = {**compiled.memory, **kept}
        points.append(Estimate(
            memory, state, [depth], files, None,
            summarize(collective for collective in program.collectives for _ in range(collective.times)),
            program.flops, program.roofline(chip, compiled.network), schedule.parts, program, schedule))
        say(f"... {seconds:.0f} s. {depth[0]} + {depth[1]} layers: {'' if chip.clock else 'at least '}"
            f"{1e3 * schedule.seconds:.1f} ms a step, {needed(memory) / 2**30:.2f} GiB a chip.")
        files |= {f"step_{depth[0]}_{depth[1]}.{suffix}": content for suffix, content in (
            ("stablehlo.mlir", text), ("optimized.hlo", compiled.hlo), ("trace.json", schedule.trace()))}
    return _extrapolated(config, points)


@contextlib.contextmanager
def _progress(expected):
    started, is_done = time.perf_counter(), threading.Event()

    def report():
        while not is_done.wait(REPORT_PERIOD):
            say(f"... {time.perf_counter() - started:.0f} s of about {expected:.0f} ...")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _bytes(lowered, kind, piece):
    """Sums the bytes of a kind of arguments, of shapes `piece(shape, spec)`."""
    return sum(math.prod(piece(one.shape, one.spec)) * tf.as_dtype(one.dtype).size
               for one in lowered.arguments if one.kind == kind)


def shallow_depths(config: SwitchConfig) -> list[tuple[int, int]]:
    """Returns two depths, a few periods of dense and sparse layers and twice that, or the model's if no larger."""
    layers = (config.num_encoder_layers, config.num_decoder_layers)
    if config.num_experts and (config.encoder_sparse_indices, config.decoder_sparse_indices) != (None, None):
        return [layers]  # no period
    steps = [step if config.num_experts else 1 for step in (config.encoder_sparse_step, config.decoder_sparse_step)]
    encoder, decoder = period = [max(step, 1) if count else 0 for step, count in zip(steps, layers, strict=True)]
    periods = {count / length for count, length in zip(layers, period, strict=True) if length}
    count = math.ceil(FEWEST_LAYERS / sum(period))
    if len(periods) != 1 or not (whole := periods.pop()).is_integer() or whole <= 2 * count:
        return [layers]
    return [(count * encoder, count * decoder), (2 * count * encoder, 2 * count * decoder)]


def _extrapolated(config, points):
    """Extrapolates from two depths: value(n) = first + (n - 1) * (second - first).

    A part with less time in the deeper model keeps that time.
    """
    first, last = points[0], points[-1]
    num_units = max(config.num_encoder_layers, config.num_decoder_layers) / max(first.compiled[0])

    def extend(one, other):
        return one + (num_units - 1) * (other - one)

    sent, nothing = (first.collectives, last.collectives), {"count": 0, "bytes": 0}
    return last._replace(
        memory={kind: round(extend(size, last.memory[kind])) for kind, size in first.memory.items()},
        state=round(extend(first.state, last.state)),
        compiled=[point.compiled[0] for point in points],
        collectives={kind: {unit: round(extend(*(one.get(kind, nothing)[unit] for one in sent))) for unit in nothing}
                     for kind in sorted({**sent[0], **sent[1]})},
        flops=extend(first.flops, last.flops),
        roofline=Roofline(*map(extend, first.roofline, last.roofline)),
        parts={part: max(last.parts.get(part, 0.0), extend(first.parts.get(part, 0.0), last.parts.get(part, 0.0)))
               for part in sorted(first.parts | last.parts)})


def needed(memory: dict[str, int]) -> int:
    """Returns the bytes that one chip needs."""
    return (memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"])


def as_json(experiment: Experiment, topology: str, chip: chips.Chip, found: Estimate) -> dict:
    """Returns the JSON object of `switch-tf compile`, or the compiler's refusal and advice.

    "..._per_device", "chip_bytes" and "collectives" are for one chip. "counted_by" is "cycles", or "rates" for lower
    bounds by nominal rates. "layers" and "seconds_by_bytes" are the deepest compiled model's.
    """
    config, layout = experiment.config, experiment.layout
    batch_size, lengths = experiment.run.batch_size, experiment.run.task_feature_lengths
    fits = found.refused is None and needed(found.memory) <= chip.memory
    result = {
        "topology": topology, "mesh": layout.mesh, "num_parameters": config.num_parameters,
        "layers": [config.num_encoder_layers, config.num_decoder_layers],
        "compiled_layers": [list(depth) for depth in found.compiled],
        "fits": fits, "chip_bytes": int(chip.memory), "collectives": found.collectives,
        "advice": [] if fits else advice(experiment, found, chip)}
    if found.refused is not None:
        return {**result, "refused": found.refused}
    seconds = sum(found.parts.values())
    model_flops = accounting.flops_per_step(config, batch_size, lengths["inputs"], lengths["targets"])
    tokens = batch_size * (lengths["inputs"] + (0 if config.is_encoder_only else lengths["targets"]))
    return {
        **result, "bytes_per_device": {**found.memory, "needed": needed(found.memory)},
        "flops_per_device": found.flops, "warnings": warnings(experiment, found.program),
        "largest_collectives": [collective._asdict() for collective in sorted(
            found.program.collectives, key=lambda collective: -collective.bytes)[:NUM_LARGEST]],
        "predicted": {
            **{f"{name}_seconds": one for name, one in found.roofline._asdict().items()},
            "floor_seconds": max(found.roofline), "counted_by": "cycles" if chip.clock else "rates",
            "step_seconds": seconds, "parts": found.parts,
            "layers": found.schedule.layers, "seconds_by_bytes": found.schedule.by_bytes,
            "tokens_per_second": tokens / seconds,
            "model_flops_utilization": model_flops / layout.num_devices / seconds / chip.flops}}


def advice(experiment: Experiment, found: Estimate, chip: chips.Chip) -> list[str]:
    """Returns a line for each measure that helps a run to fit its chips."""
    config, layout, settings = experiment.config, experiment.layout, experiment.settings
    lines = []
    kept, temporaries = found.memory["weights"] + found.memory["slots"], found.memory["temporaries"]
    if found.refused is None:
        lines.append(f"{_gib(needed(found.memory) - chip.memory)} a chip are missing: weights and slots "
                     f"take {_gib(kept)}, activations and temporaries {_gib(temporaries)}, of {_gib(chip.memory)}.")
        if len(found.compiled) > 1 and kept < chip.memory:
            lines.append("Compile all layers: the compiler may keep less of each than of the few that this is "
                         "extrapolated from, for which it has room: --full.")
    if kept > chip.memory / 2:
        lines.append(f"Weights and slots are {_gib(found.state)} in all, {_gib(found.state / layout.num_devices)} a "
                     "chip where all are split over all (gin/layouts/fully_sharded_model.gin); "
                     f"{math.ceil(2 * found.state / chip.memory)} chips hold them in half of their memory.")
    if not config.remat:
        lines.append("Recompute activations in the backward pass, for about a third more compute: "
                     "--gin.SwitchConfig.remat=True.")
    batch_size, present = experiment.run.batch_size, settings.num_microbatches
    parts = 2 * present
    while batch_size % (parts * layout.num_pieces("batch")) == 0:
        if kept + temporaries * present / parts <= ROOM * chip.memory:
            multiple = math.lcm(config.num_groups_multiple, parts * layout.num_pieces("group"))
            groups = f" --gin.SwitchConfig.num_groups_multiple={multiple}" if (
                config.num_experts and multiple != config.num_groups_multiple) else ""
            lines.append(f"Process the batch in parts, about {_gib(temporaries * present / parts)} of "
                         f"activations and temporaries each: --gin.StepSettings.num_microbatches={parts}{groups}.")
            lines.append(f"Or take a smaller batch: --gin.BATCH_SIZE={batch_size * present // parts}.")
            break
        parts *= 2
    return lines


def _gib(size):
    return f"{size / 2**30:.2f} GiB"


def warnings(experiment: Experiment, program: Program) -> list[str]:
    """Returns a sentence for each fault: gathered experts, repeated work, or a loop of unknown length."""
    config, layout, run = experiment.config, experiment.layout, experiment.run
    faults = [f"the loop {loop} does not say how often it runs and is counted once, so that FLOPs, traffic and "
              "collectives are too low" for loop in program.unread_loops]
    if not config.num_experts:
        return faults
    experts = [weight for weight in config.weights() if "expert" in weight.axes]
    stacked = {",".join(map(str, weight.shape)) for weight in experts}
    faults += [f"{one.kind} of {one.shape} in {one.where}: the weights of all experts are brought together on each chip"
               for one in program.collectives
               if one.kind == "all-gather" and one.shape.partition("[")[2].rstrip("]") in stacked]
    # A product of the experts should not exceed a chip's share of their buffers.
    slots = 0
    for feature, layers in (("inputs", config.encoder_sparse_layers), ("targets", config.decoder_sparse_layers)):
        if layers:
            tokens = (run.batch_size // experiment.settings.num_microbatches, run.task_feature_lengths[feature])
            plan = grouping.plan(config.grouping, tokens, training=True)
            slots = max(slots, config.num_experts * plan.groups.count * plan.capacity)
    gradients = {math.prod(layout.piece(weight.shape, layout.spec(weight.axes))) for weight in experts}
    inner = config.num_heads * config.d_kv if config.has_attention_experts else 0
    width = max(config.d_model, inner, config.expert_width // layout.num_pieces("expert_mlp"))
    share = slots // layout.num_pieces("batch") * width
    largest = max((size for size in program.expert_products if size not in gradients), default=0)
    if largest > TOLERANCE * share:
        faults.append(f"a product of the experts makes {largest:,} numbers on each chip, where its share is {share:,}: "
                      "tokens are computed on several chips at once; the layout should split group, as it does batch")
    return faults
