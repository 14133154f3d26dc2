"""Estimates memory, collectives and time of a training step on a pod, from programs that XLA compiles."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from switch_tf.aot import trace
from switch_tf.aot.clock import Schedule
from switch_tf.aot.compiler import DoesNotFit, compile_step
from switch_tf.aot.lower import lower_step
from switch_tf.aot.program import InTurn, Program
from switch_tf.aot.roofline import Roofline, link_seconds
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective
from switch_tf.hardware import chips, devices
from switch_tf.hardware.chips import Chip
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.collectives import summarize
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal
from switch_tf.training.division import check_division

REPORT_PERIOD = 20  # seconds
# The functions of a step that has two, in order, and the part of the model of their operations without a layer.
FUNCTIONS = {"gradients": "logits and loss", "update": "optimizer"}
# Memory grows evenly with the number of layers from here on. With fewer, the compiler has room and keeps more.
FEWEST_LAYERS = 4
# The compiler's time grows with the length of the program. This rate for the first depth lies between those of busy and
# idle machines; the second depth uses the rate of the first.
LINES_PER_SECOND = {"TPU": 250, "GPU": 1500}


class Question(NamedTuple):
    """A run and the pod that it would train on.

    Attributes:
        config: Configuration of the model.
        dtype: Dtype policy of the model.
        make_optimizer: Returns an optimizer that is not built.
        layout: Layout with a complete mesh.
        topology: Name such as "v5e:4x4".
        chip: Chip of the topology.
        batch_size: Sequences of the whole batch.
        task_feature_lengths: "inputs" and "targets", in tokens.
        settings: Settings of the step.
        pack: Whether sequences hold several examples, masked by segments.
        make_objective: Returns an objective that is not built.
    """

    config: SwitchConfig
    dtype: str | keras.DTypePolicy
    make_optimizer: Callable
    layout: Layout
    topology: str
    chip: Chip
    batch_size: int
    task_feature_lengths: dict[str, int]
    settings: StepSettings
    pack: bool = False
    make_objective: Callable = Objective


class Estimate(NamedTuple):
    """Needs of one chip for a step.

    Attributes:
        memory: Bytes by kind: those of `Compiled`, and in them "weights", "slots" and "gradients" (0 if none live
            between two programs).
        collectives: Kind -> count and bytes in a step.
        flops: FLOPs of a step.
        roofline: Least seconds of a step.
        parts: Seconds of a step by the compiler's clock, by part of the model.
        state: Bytes of all weights and slots on all chips.
        program, schedule: Those of the deepest compiled model.
        compiled: Depths that were compiled.
        refused: The compiler's message if it found no room, else None. The other values are then those of the refused
            depth, if known.
    """

    memory: dict[str, int]
    collectives: dict[str, dict[str, int]]
    flops: float
    roofline: Roofline
    parts: dict[str, float]
    state: int
    program: Program | InTurn | None
    schedule: Schedule | None
    compiled: list[tuple[int, int]]
    refused: str | None


class _Point(NamedTuple):
    """Memory, collectives and schedule of one compiled depth."""

    memory: dict[str, int]
    flops: float
    roofline: Roofline
    state: int
    program: InTurn
    schedule: Schedule


def make(question: Question, is_full: bool = False, say: Callable[[str], None] = lambda text: None,
         keep: Callable[[str, str], None] = lambda name, text: None) -> Estimate:
    """Compiles a step, whole or at two shallow depths and extrapolated linearly.

    Args:
        question: Run and pod.
        is_full: Whether to compile all layers.
        say: Prints a line.
        keep: Takes a file's name and text. Called for each depth with one complete step per file.

    Raises:
        Refusal: The run does not fit its layout, or the layout its topology.
    """
    _check(question)
    lines_per_second = LINES_PER_SECOND[chips.kind(question.topology)]
    config = question.config
    depths = [(config.num_encoder_layers, config.num_decoder_layers)] if is_full else shallow_depths(config)
    points = []
    for depth in depths:
        started = time.perf_counter()
        say(f"Lowering {depth[0]} + {depth[1]} layers ...")
        model = SwitchTransformer(dataclasses.replace(config, num_encoder_layers=depth[0], num_decoder_layers=depth[1]),
                                  dtype=question.dtype)
        with devices.supposed(chips.kind(question.topology), question.topology):
            lowered = lower_step(model, question.make_optimizer(), question.layout, question.batch_size,
                                 question.task_feature_lengths, question.settings, question.pack,
                                 question.make_objective())
        texts = [program.text for program in lowered]
        num_lines = sum(text.count("\n") for text in texts)
        expected = num_lines / lines_per_second
        say(f"... {time.perf_counter() - started:.0f} s; compiling for {question.topology}, about {expected:.0f} s ...")
        try:
            with _progress(say, expected):
                compiled = [compile_step(program, question.topology) for program in lowered]
        except DoesNotFit as error:
            memory = {**_stored(lowered), "temporaries": error.temporaries}
            return Estimate(memory, {}, 0.0, Roofline(0.0, 0.0, 0.0), {}, _state(lowered), None, None, [depth],
                            str(error))
        seconds = sum(program.seconds for program in compiled)
        lines_per_second = num_lines / seconds
        for kind, modules in (("stablehlo.mlir", texts), ("optimized.hlo", [program.hlo for program in compiled])):
            keep(f"step_{depth[0]}_{depth[1]}.{kind}", _joined(modules))
        points.append(_point(lowered, compiled, question))
        say(f"... {seconds:.0f} s. {depth[0]} + {depth[1]} layers: {'' if question.chip.clock else 'at least '}"
            f"{1e3 * points[-1].schedule.seconds:.1f} ms a step, {needed(points[-1].memory) / 2**30:.2f} GiB a chip.")
        keep(f"step_{depth[0]}_{depth[1]}.trace.json", trace.chrome(points[-1].schedule))
    return _extrapolated(config, depths, points)


def _joined(texts):
    """Joins the modules of a step to one text. Of two functions, each follows a comment with its name."""
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"// {function}\n{text}" for function, text in zip(FUNCTIONS, texts, strict=True))


def _check(question):
    settings = question.settings
    check_division(question.config, question.layout, question.batch_size, question.task_feature_lengths,
              settings.num_microbatches)
    if settings.steps_per_call != 1:
        raise Refusal(f"One step is compiled, so steps_per_call must be 1, not {settings.steps_per_call}.")


@contextlib.contextmanager
def _progress(say, expected):
    """Prints elapsed and expected seconds every 20 s."""
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


def _point(lowered, compiled, question):
    program = InTurn([Program(part.hlo, question.layout.mesh) for part in compiled])
    links = link_seconds(program.collectives, question.chip, compiled[0].network)
    roofline = Roofline.of(program.product_seconds(question.chip), program.memory_traffic(), links, question.chip)
    schedule = program.schedule(question.chip, compiled[0].network, [*FUNCTIONS.values()])
    return _Point(_memory(lowered, compiled), program.flops, roofline, _state(lowered), program, schedule)


def _memory(lowered, compiled):
    """Returns bytes by kind of one program, or of two that run in turn. Memory that both use counts once."""
    memory, stored = dict(compiled[0].memory), _stored(lowered)
    if len(compiled) == 2:
        first, second = (part.memory for part in compiled)
        memory = {kind: first[kind] + second[kind] for kind in ("outputs", "aliased", "code")}
        memory |= {kind: max(first[kind], second[kind]) for kind in ("temporaries", "peak")}
        # The batch and the arguments of the second program always live; gradients are results of the first.
        memory["arguments"] = second["arguments"] - stored["gradients"] + _share(lowered[0], "feature")
    return {**memory, **stored}


def _stored(lowered):
    """Returns bytes on one chip of the last program's arguments, which live throughout the step, by kind."""
    return {f"{kind}s": _share(lowered[-1], kind) for kind in ("weight", "slot", "gradient")}


def _share(lowered, kind):
    """Returns the bytes on one chip of a program's arguments of a kind."""
    return sum(_bytes(lowered.layout.piece(argument.shape, argument.spec), argument.dtype)
               for argument in lowered.arguments if argument.kind == kind)


def _state(lowered):
    return sum(_bytes(argument.shape, argument.dtype) for argument in lowered[-1].arguments
               if argument.kind in ("weight", "slot"))


def _bytes(shape, dtype):
    return math.prod(shape) * tf.as_dtype(dtype).size


def shallow_depths(config: SwitchConfig) -> list[tuple[int, int]]:
    """Returns a few periods of dense and sparse layers and twice as many, or the model's depth if it is no larger."""
    if config.num_experts and (config.encoder_sparse_indices, config.decoder_sparse_indices) != (None, None):
        return [(config.num_encoder_layers, config.num_decoder_layers)]  # chosen layers have no period
    steps = [step if config.num_experts else 1 for step in (config.encoder_sparse_step, config.decoder_sparse_step)]
    layers = (config.num_encoder_layers, config.num_decoder_layers)
    encoder, decoder = period = [max(step, 1) if count else 0 for step, count in zip(steps, layers, strict=True)]
    periods = {count / length for count, length in zip(layers, period, strict=True) if length}
    count = math.ceil(FEWEST_LAYERS / sum(period))
    if len(periods) != 1 or not (whole := periods.pop()).is_integer() or whole <= 2 * count:
        return [layers]
    return [(count * encoder, count * decoder), (2 * count * encoder, 2 * count * decoder)]


def _extrapolated(config, depths, points):
    """Extrapolates from two depths, the second twice the first: value(n) = first + (n - 1) * (second - first).

    A part of a step that takes less time in the deeper model keeps that time.
    """
    num_units = 1.0
    if len(depths) == 2:
        num_units = max(config.num_encoder_layers, config.num_decoder_layers) / max(depths[0])

    def extend(values):
        first, last = values[0], values[-1]
        return first + (num_units - 1) * (last - first)

    summaries = [summarize(collective for collective in point.program.collectives for _ in range(collective.times))
                 for point in points]
    kinds = sorted(set().union(*summaries))
    parts = [point.schedule.parts for point in points]
    nothing = {"count": 0, "bytes": 0}
    return Estimate(
        memory={kind: round(extend([point.memory[kind] for point in points])) for kind in points[0].memory},
        collectives={kind: {unit: round(extend([summary.get(kind, nothing)[unit] for summary in summaries]))
                            for unit in nothing} for kind in kinds},
        flops=extend([point.flops for point in points]),
        roofline=Roofline(*(extend(seconds) for seconds in zip(*(point.roofline for point in points), strict=True))),
        parts={part: max(parts[-1].get(part, 0.0), extend([seconds.get(part, 0.0) for seconds in parts]))
               for part in sorted(set().union(*parts))},
        state=round(extend([point.state for point in points])),
        program=points[-1].program, schedule=points[-1].schedule, compiled=depths, refused=None)


def needed(memory: dict[str, int]) -> int:
    """Returns the bytes that one chip needs for a step."""
    return (memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"])
