"""Time of a step by the compiler's own clock: its estimate for each instruction, in the order of its schedule.

The TPU compiler writes `estimated_cycles` beside nearly every operation of an optimised program. The GPU compiler
writes none, so an operation takes the least time that nominal rates allow for its products and bytes. Operations run on
the core in the order of the text. Copies between memories and collectives run beside them, from where the
schedule starts them to where it waits for them.
"""

import collections
import re
from typing import NamedTuple

from switch_tf.aot import hlo, product_flops
from switch_tf.aot.attribution import SENT, WAITING, Attribution
from switch_tf.hardware.chips import Chip

CORE, COPIES, LINKS = "core", "copies", "links"
# Calls that only name values and take no time.
_FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|X64SplitLow|X64SplitHigh|X64Combine|Sharding)"')
_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')


class Span(NamedTuple):
    """An instruction's time on one lane.

    Attributes:
        name: Name of the instruction.
        lane: "core", "copies" or "links".
        part, layer: Part of the model and layer, from `Attribution`.
        start, seconds: Start and duration of one run.
        times: Number of consecutive runs in a step.
    """

    name: str
    lane: str
    part: str
    layer: str
    start: float
    seconds: float
    times: int = 1


class Schedule(NamedTuple):
    """A program by the clock.

    Attributes:
        seconds: Duration of the program.
        spans: Its spans; a loop has those of its first pass.
        parts: Part of the model -> seconds on the core, which add up to `seconds`.
        layers: Likewise by layer.
        by_bytes: Kind of an operation without estimated cycles -> seconds by the nominal rates.
    """

    seconds: float
    spans: list[Span]
    parts: dict[str, float]
    layers: dict[str, float]
    by_bytes: dict[str, float]


class SendTimes(NamedTuple):
    """Times of the collectives of a program.

    Attributes:
        seconds: Name of a collective -> seconds of one run.
        carriers: Name of a fusion -> the collective that it starts, continues or awaits, from `collectives.carriers`.
    """

    seconds: dict[str, float]
    carriers: dict[str, str]


def schedule(module: hlo.Module, chip: Chip, sends: SendTimes, default: str) -> Schedule:
    """Runs a program by the clock.

    Args:
        module: Parsed program.
        chip: Chip that runs it.
        sends: Times of its collectives.
        default: Part of operations with a name that contains no layer.
    """
    origins = Attribution(module, default)
    seconds, spans = _Core(module, chip, sends, origins).run(module.entry)
    parts, layers, by_bytes = (collections.defaultdict(float) for _ in range(3))
    for span in spans:
        if span.lane == CORE:
            parts[span.part] += span.seconds * span.times
            layers[span.layer] += span.seconds * span.times
            instruction = module.instructions[span.name]
            if instruction.cycles is None and span.part not in (WAITING, SENT):
                by_bytes[instruction.kind] += span.seconds * span.times
    return Schedule(seconds, spans, dict(parts), dict(layers), dict(by_bytes))


def in_turn(schedules: list[Schedule]) -> Schedule:
    """Joins the schedules of programs that run one after the other. Their instructions may share names."""
    start, spans = 0.0, []
    parts, layers, by_bytes = (collections.Counter() for _ in range(3))
    for part in schedules:
        spans += [span._replace(start=start + span.start) for span in part.spans]
        start += part.seconds
        for total, seconds in ((parts, part.parts), (layers, part.layers), (by_bytes, part.by_bytes)):
            total.update(seconds)
    return Schedule(start, spans, dict(parts), dict(layers), dict(by_bytes))


class _Core:
    """One pass over a computation. A called computation is another pass."""

    def __init__(self, module, chip, sends, origins):
        self._module, self._chip, self._sends, self._origins = module, chip, sends, origins
        self._now = self._copies_until = self._links_until = 0.0
        # The last fusion with a part of a collective waits for it.
        self._last_carriers = {*{collective: fusion for fusion, collective in sends.carriers.items()}.values()}
        self._until = {}  # name of a started operation -> (time of its end, part of waiting for it)
        self._spans = []

    def run(self, computation) -> tuple[float, list[Span]]:
        """Runs the computation; returns its seconds, and spans that start at 0."""
        for instruction in self._module.computations[computation]:
            self._step(instruction)
        return self._now, self._spans

    def _step(self, instruction):
        kind, name = instruction.kind, instruction.name
        if kind.endswith("-done"):
            self._wait_for(instruction, instruction.operands[0])
        elif kind.endswith("-update"):
            self._until[name] = self._until.get(instruction.operands[0], (self._now, WAITING))
        elif name in self._sends.carriers:
            self._carry(instruction, self._sends.carriers[name])
        elif name in self._sends.seconds:
            self._send(instruction, name)
            if not kind.endswith("-start"):
                self._wait_for(instruction, name)
        elif kind == "call-start":
            self._offload(instruction)
        elif kind.endswith("-start"):
            moved = self._moved(instruction) / self._chip.memory_bandwidth
            self._copies_until = self._beside(instruction, name, COPIES, self._copies_until, moved, WAITING)
        elif kind == "while":
            self._within(instruction, instruction.called["body"][0], self._module.loops[name] or 1)
        elif kind == "conditional":
            longest = max(instruction.called["branches"], key=lambda branch: self._inner().run(branch)[0])
            self._within(instruction, longest, 1)
        elif kind == "call":
            self._within(instruction, instruction.called["to_apply"][0], 1)
        elif kind not in hlo.NAMES:
            self._busy(instruction, self._takes(instruction), self._origins.part(instruction))

    def _inner(self):
        return _Core(self._module, self._chip, self._sends, self._origins)

    def _within(self, instruction, computation, times):
        """Runs another computation `times` in a row."""
        seconds, spans = self._inner().run(computation)
        self._spans += [span._replace(start=self._now + span.start, times=span.times * times) for span in spans]
        self._now += seconds * times

    def _busy(self, instruction, seconds, part):
        if seconds:
            self._add(instruction, CORE, part, self._now, seconds)
        self._now += seconds

    def _send(self, instruction, collective):
        self._links_until = self._beside(instruction, collective, LINKS, self._links_until,
                                         self._sends.seconds[collective], SENT)

    def _carry(self, fusion, collective):
        """Runs a fusion with a part of a collective. The first one starts the collective, the last one waits for it."""
        if collective not in self._until:
            self._send(fusion, collective)
        if fusion.cycles is not None:
            self._busy(fusion, self._takes(fusion), self._origins.part(fusion))
        if fusion.name in self._last_carriers:
            self._wait_for(fusion, collective)

    def _offload(self, call):
        """Runs a call beside the core, such as a collective on a SparseCore."""
        seconds, spans = self._inner().run(call.called["to_apply"][0])
        if any(span.lane == LINKS for span in spans):
            self._links_until = self._beside(call, call.name, LINKS, self._links_until, seconds, SENT)
        else:
            self._copies_until = self._beside(call, call.name, COPIES, self._copies_until, seconds, WAITING)

    def _beside(self, instruction, started, lane, lane_until, seconds, waiting):
        """Starts an operation beside the core; returns the time at which its lane is free."""
        start = max(self._now, lane_until)
        if seconds:
            self._add(instruction, lane, self._origins.part(instruction), start, seconds)
        self._until[started] = start + seconds, waiting
        return start + seconds

    def _wait_for(self, instruction, started):
        until, waiting = self._until.get(started, (self._now, WAITING))
        if until > self._now:
            self._add(instruction, CORE, waiting, self._now, until - self._now)
            self._now = until

    def _add(self, instruction, lane, part, start, seconds):
        self._spans.append(Span(instruction.name, lane, part, self._origins.layer(instruction), start, seconds))

    def _takes(self, instruction):
        """Returns seconds by the compiler's cycles, a kernel's own estimate, or its products and bytes."""
        if instruction.cycles is not None:
            return instruction.cycles / self._chip.clock
        if instruction.kind == "custom-call":
            if _FREE_CALLS.search(instruction.line):
                return 0.0
            if match := _COST.search(instruction.line):
                cost = {name: float(value) for name, value in re.findall(r'"(\w+)":"?(\d+)', match[1])}
                return max(cost.get("flops", 0.0) / self._chip.flops,
                           cost.get("bytes_accessed", 0.0) / self._chip.memory_bandwidth)
        return max(product_flops.seconds(self._module, instruction, self._chip),
                   self._bytes(instruction) / self._chip.memory_bandwidth)

    def _bytes(self, instruction):
        operands = [self._module.instructions[name].written for name in set(instruction.operands)
                    if name in self._module.instructions]
        return sum(array.bytes for shape in (instruction.written, *operands) for array in hlo.arrays(shape))

    def _moved(self, instruction):
        """Returns the bytes that a copy beside the core moves: those of its smaller end."""
        ends = hlo.arrays(instruction.shape)[:2]
        return min((end.bytes for end in ends), default=0)
