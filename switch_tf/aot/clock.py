"""The step by the compiler's own clock: what it expects each instruction to take, in the order of its schedule.

The compiler for TPUs writes `estimated_cycles` beside nearly every operation of an optimised program. Operations follow
each other on the core in the order in which they are written; copies between memories, and what is sent, go on beside
them from where the schedule starts them to where it waits for them.
"""

import collections
import re
from typing import NamedTuple

from switch_tf.aot import hlo
from switch_tf.aot.attribution import SENT, WAITING, Attribution
from switch_tf.hardware.chips import Chip

CORE, COPIES, LINKS = "core", "copies", "links"
# Calls that name values and take no time.
_FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|X64SplitLow|X64SplitHigh|X64Combine|Sharding)"')
_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')


class Span(NamedTuple):
    """`name` of an instruction; `lane`: "core", "copies" or "links"; `part` of the model and `layer`, from `Attribution`;
    `start`, `seconds`: of one time; `times`: how often a step does it, one after the other."""

    name: str
    lane: str
    part: str
    layer: str
    start: float
    seconds: float
    times: int = 1


class Schedule(NamedTuple):
    """`seconds`: of a program; `spans`: what goes on in it, of a loop the first pass; `parts`: part -> seconds of the
    core, which add up to `seconds`; `layers`: likewise by layer; `by_bytes`: kind of operation for which the compiler
    names no cycles -> seconds, which are counted by the bytes that it moves."""

    seconds: float
    spans: list[Span]
    parts: dict[str, float]
    layers: dict[str, float]
    by_bytes: dict[str, float]


class SendTimes(NamedTuple):
    """`seconds`: name of a collective -> what it takes once; `carriers`: name of a fusion -> the collective that it
    starts, carries on or waits for, see `sent.carriers`."""

    seconds: dict[str, float]
    carriers: dict[str, str]


def schedule(module: hlo.Module, chip: Chip, sends: SendTimes, default: str) -> Schedule:
    """Runs a program by the clock.

    Args:
        module: Module.
        chip: Chip.
        sends: SendTimes.
        default: the part of what no layer has asked for.
    """
    origins = Attribution(module, default)
    seconds, spans = _Core(module, chip, sends, origins).run(module.entry)
    parts, layers, by_bytes = (collections.Counter() for _ in range(3))
    for span in spans:
        if span.lane == CORE:
            parts[span.part] += span.seconds * span.times
            layers[span.layer] += span.seconds * span.times
            instruction = module.instructions[span.name]
            if instruction.cycles is None and span.part not in (WAITING, SENT):
                by_bytes[instruction.kind] += span.seconds * span.times
    return Schedule(seconds, spans, dict(parts), dict(layers), dict(by_bytes))


def in_turn(schedules: list[Schedule]) -> Schedule:
    """Programs that run one after the other, as one; their instructions may have the same names."""
    start, spans = 0.0, []
    parts, layers, by_bytes = (collections.Counter() for _ in range(3))
    for one in schedules:
        spans += [span._replace(start=start + span.start) for span in one.spans]
        start += one.seconds
        for total, found in ((parts, one.parts), (layers, one.layers), (by_bytes, one.by_bytes)):
            total.update(found)
    return Schedule(start, spans, dict(parts), dict(layers), dict(by_bytes))


class _Core:
    """One pass over a computation; what it calls is another one."""

    def __init__(self, module, chip, sends, origins):
        self._module, self._chip, self._sends, self._origins = module, chip, sends, origins
        self._now = self._copies_until = self._links_until = 0.0
        # The fusions that wait for a collective: the last that has a part of it.
        self._last_carriers = {*{collective: fusion for fusion, collective in sends.carriers.items()}.values()}
        self._until = {}  # what was started -> (when it ends, what waiting for it is)
        self._spans = []

    def run(self, computation) -> tuple[float, list[Span]]:
        """Seconds, and spans from 0 on."""
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
        """What another computation does, `times` in a row."""
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
        """A fusion with a part of a collective in it: the first starts it, the last one waits for it."""
        if collective not in self._until:
            self._send(fusion, collective)
        if fusion.cycles is not None:
            self._busy(fusion, self._takes(fusion), self._origins.part(fusion))
        if fusion.name in self._last_carriers:
            self._wait_for(fusion, collective)

    def _offload(self, call):
        """A call that goes on beside the core, such as a collective that a SparseCore sees to."""
        seconds, spans = self._inner().run(call.called["to_apply"][0])
        if any(span.lane == LINKS for span in spans):
            self._links_until = self._beside(call, call.name, LINKS, self._links_until, seconds, SENT)
        else:
            self._copies_until = self._beside(call, call.name, COPIES, self._copies_until, seconds, WAITING)

    def _beside(self, instruction, started, lane, lane_until, seconds, waiting):
        """Starts what goes on beside the core; returns until when its lane is busy."""
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
        """Seconds: by the compiler's cycles, a kernel's own estimate, or the bytes that are read and written."""
        if instruction.cycles is not None:
            return instruction.cycles / self._chip.clock
        if instruction.kind == "custom-call":
            if _FREE_CALLS.search(instruction.line):
                return 0.0
            if found := _COST.search(instruction.line):
                cost = {name: float(value) for name, value in re.findall(r'"(\w+)":"?(\d+)', found[1])}
                return max(cost.get("flops", 0.0) / self._chip.flops,
                           cost.get("bytes_accessed", 0.0) / self._chip.memory_bandwidth)
        return self._bytes(instruction) / self._chip.memory_bandwidth

    def _bytes(self, instruction):
        operands = [self._module.instructions[name].shape for name in set(instruction.operands)
                    if name in self._module.instructions]
        return sum(array.bytes for shape in (instruction.shape, *operands) for array in hlo.arrays(shape))

    def _moved(self, instruction):
        """Bytes of a copy that goes on beside the core: of the smaller end, which is all that is moved."""
        ends = hlo.arrays(instruction.shape)[:2]
        return min((end.bytes for end in ends), default=0)
