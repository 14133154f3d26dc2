"""One question to the compiler, "does this run fit this pod, and what does it cost", and its answer in numbers."""

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
from switch_tf.hardware.chips import Chip
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.collectives import summarize
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal
from switch_tf.training.division import check_division

TELL_EVERY = 20  # seconds
# The functions of a step where it has two, in order, and what of the model they serve where no layer has asked.
FUNCTIONS = {"gradients": "logits and loss", "update": "optimizer"}
# Memory grows by the same for every layer only from here on: with fewer, the compiler has room and keeps more.
FEWEST_LAYERS = 4
# The compiler's time grows with the length of the program. A rough rate for the first depth, between what busy and idle
# machines showed; the second depth is estimated from the first.
LINES_PER_SECOND = 250


class Question(NamedTuple):
    """A run and the pod that it would train on.

    `dtype`: the model's dtype policy. `make_optimizer`, `make_objective`: functions that return an optimizer and an
    Objective, not built. `topology`: name such as "v5e:4x4", and `chip` its chips. The others as for `lower_step`.
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
    """For one chip: `memory` in bytes by kind, those of `Compiled` and of them "weights", "slots" and "gradients" (0
    where none live between two programs); `collectives` (kind -> count and bytes of a step), `flops` of a step, its
    `roofline`, and `parts`, seconds of a step by the compiler's clock, by part of the model. `state`: bytes of all
    weights and slots together; `program` and `schedule`: of the deepest model that was compiled; `compiled`: the depths
    that were compiled; `refused`: the compiler's words where it found no room, else None: then all is of the depth that
    was refused, where known."""

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
    """What one compiled depth needs and sends, and its seconds by part."""

    memory: dict[str, int]
    flops: float
    roofline: Roofline
    state: int
    program: InTurn
    schedule: Schedule


def make(question: Question, is_full=False, say=lambda text: None, keep=lambda name, text: None) -> Estimate:
    """Compiles a step, whole or at two shallow depths from which the rest is extrapolated linearly.

    Args:
        question: Question.
        is_full: bool. Compile all layers.
        say: function of a line of text.
        keep: function of a file's name and its text, called for the step of each depth; one complete step a file.

    Raises:
        Refusal: the run does not fit its layout, or the layout its topology.
    """
    _check(question)
    lines_per_second = LINES_PER_SECOND
    config = question.config
    depths = [(config.num_encoder_layers, config.num_decoder_layers)] if is_full else shallow_depths(config)
    points = []
    for depth in depths:
        started = time.perf_counter()
        say(f"Lowering {depth[0]} + {depth[1]} layers ...")
        model = SwitchTransformer(dataclasses.replace(config, num_encoder_layers=depth[0], num_decoder_layers=depth[1]),
                                  dtype=question.dtype)
        lowered = lower_step(model, question.make_optimizer(), question.layout, question.batch_size,
                             question.task_feature_lengths, question.settings, question.pack,
                             question.make_objective())
        num_lines = sum(program.text.count("\n") for program in lowered)
        expected = num_lines / lines_per_second
        say(f"... {time.perf_counter() - started:.0f} s; compiling for {question.topology}, about {expected:.0f} s ...")
        try:
            with _told_meanwhile(say, expected):
                compiled = [compile_step(program, question.topology) for program in lowered]
        except DoesNotFit as error:
            nothing = Roofline(0.0, 0.0, 0.0)
            memory = {**_stored(lowered), "temporaries": error.temporaries}
            return Estimate(memory, {}, 0.0, nothing, {}, _state(lowered), None, None, [depth], str(error))
        seconds = sum(program.seconds for program in compiled)
        lines_per_second = num_lines / seconds
        for kind, texts in (("stablehlo.mlir", [program.text for program in lowered]),
                            ("optimized.hlo", [program.hlo for program in compiled])):
            keep(f"step_{depth[0]}_{depth[1]}.{kind}", _one_after_the_other(texts))
        points.append(_point(lowered, compiled, question))
        say(f"... {seconds:.0f} s. {depth[0]} + {depth[1]} layers: {1e3 * points[-1].schedule.seconds:.1f} ms a step, "
            f"{needed(points[-1].memory) / 2**30:.2f} GiB a chip.")
        keep(f"step_{depth[0]}_{depth[1]}.trace.json", trace.chrome(points[-1].schedule))
    return _answer(config, depths, points)


def _one_after_the_other(texts):
    """The modules of a step as one text; where there are two functions, each below a comment with its name."""
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
def _told_meanwhile(say, expected):
    """Prints elapsed and expected seconds every 20 s."""
    started, is_done = time.perf_counter(), threading.Event()

    def tell():
        while not is_done.wait(TELL_EVERY):
            say(f"... {time.perf_counter() - started:.0f} s of about {expected:.0f} ...")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _point(lowered, compiled, question):
    program = InTurn([Program(one.hlo, question.layout.mesh) for one in compiled])
    links = link_seconds(program.collectives, question.chip, compiled[0].network)
    roofline = Roofline.of(program.flops, program.memory_traffic(), links, question.chip)
    schedule = program.schedule(question.chip, compiled[0].network, [*FUNCTIONS.values()])
    return _Point(_memory(lowered, compiled), program.flops, roofline, _state(lowered), program, schedule)


def _memory(lowered, compiled):
    """Bytes by kind of one program, or of two that run in turn; what both need at a time counts once."""
    memory, stored = dict(compiled[0].memory), _stored(lowered)
    if len(compiled) == 2:
        first, second = (one.memory for one in compiled)
        memory = {kind: first[kind] + second[kind] for kind in ("outputs", "aliased", "code")}
        memory |= {kind: max(first[kind], second[kind]) for kind in ("temporaries", "peak")}
        # At any time there are the batch and all that the second program takes; gradients are results of the first.
        memory["arguments"] = second["arguments"] - stored["gradients"] + _share(lowered[0], "feature")
    return {**memory, **stored}


def _stored(lowered):
    """Bytes on one chip by kind of what the last program takes, which all are stored while the step runs."""
    return {f"{kind}s": _share(lowered[-1], kind) for kind in ("weight", "slot", "gradient")}


def _share(lowered, kind):
    """Bytes of a program's arguments of a kind on one chip."""
    return sum(_bytes(lowered.layout.piece(argument.shape, argument.spec), argument.dtype)
               for argument in lowered.arguments if argument.kind == kind)


def _state(lowered):
    return sum(_bytes(argument.shape, argument.dtype) for argument in lowered[-1].arguments
               if argument.kind in ("weight", "slot"))


def _bytes(shape, dtype):
    return math.prod(shape) * tf.as_dtype(dtype).size


def shallow_depths(config) -> list[tuple[int, int]]:
    """A few periods of dense and sparse layers, and twice as many; the model's own depth where that is not more."""
    steps = [step if config.num_experts else 1 for step in (config.encoder_sparse_step, config.decoder_sparse_step)]
    layers = (config.num_encoder_layers, config.num_decoder_layers)
    period = tuple(max(step, 1) if count else 0 for step, count in zip(steps, layers, strict=True))
    periods = {count / length for count, length in zip(layers, period, strict=True) if length}
    count = math.ceil(FEWEST_LAYERS / sum(period))
    if len(periods) != 1 or not (whole := periods.pop()).is_integer() or whole <= 2 * count:
        return [layers]
    return [tuple(count * length for length in period), tuple(2 * count * length for length in period)]


def _answer(config, depths, points):
    """Extrapolates from two depths, the second twice the first, which is one unit: value(n) = first + (n - 1) more.

    A part of a step that takes less in the deeper model is left as it is there.
    """
    num_units = 1.0
    if len(depths) == 2:
        num_units = max(config.num_encoder_layers, config.num_decoder_layers) / max(depths[0])

    def extend(values):
        first, last = values[0], values[-1]
        return first + (num_units - 1) * (last - first)

    summaries = [summarize(one for one in point.program.collectives for _ in range(one.times)) for point in points]
    kinds = sorted(set().union(*summaries))
    parts = [point.schedule.parts for point in points]
    nothing = {"count": 0, "bytes": 0}
    return Estimate(
        memory={kind: round(extend([point.memory[kind] for point in points])) for kind in points[0].memory},
        collectives={kind: {unit: round(extend([summary.get(kind, nothing)[unit] for summary in summaries]))
                            for unit in nothing} for kind in kinds},
        flops=extend([point.flops for point in points]),
        roofline=Roofline(*(extend(seconds) for seconds in zip(*(point.roofline for point in points), strict=True))),
        parts={part: max(parts[-1].get(part, 0.0), extend([found.get(part, 0.0) for found in parts]))
               for part in sorted(set().union(*parts))},
        state=round(extend([point.state for point in points])),
        program=points[-1].program, schedule=points[-1].schedule, compiled=depths, refused=None)


def needed(memory: dict[str, int]) -> int:
    """Bytes that one chip must have for a step."""
    return (memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"])
