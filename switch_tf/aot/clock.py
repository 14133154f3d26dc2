"""Predicts a step's time from the compiler's cycles for each instruction, in the order of its schedule.

The GPU compiler writes no cycles, so its operations take the least time by nominal rates. The core runs operations in
the order of the text. Copies and collectives run in parallel, from their start to the wait for them.
"""

import collections
import json
import re
from typing import NamedTuple

from switch_tf.aot import hlo
from switch_tf.aot.hlo import SENT, WAITING, attribute
from switch_tf.hardware.chips import Chip
from switch_tf.reporting.report import matplotlib, new_figure, png

CORE, COPIES, LINKS = "core", "copies", "links"
_WAITS = {COPIES: WAITING, LINKS: SENT}
_TITLES = {CORE: "core", COPIES: "copies between memories", LINKS: "links to other chips"}
_FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|X64SplitLow|X64SplitHigh|X64Combine|Sharding)"')
_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')


class Span(NamedTuple):
    """An instruction's time on one lane.

    Attributes:
        lane: "core", "copies" or "links".
        part, layer: From `attribute`.
        start, seconds: Of one run.
        times: Consecutive runs in a step.
    """

    name: str
    lane: str
    part: str
    layer: str
    start: float
    seconds: float
    times: int = 1


class Schedule(NamedTuple):
    """A predicted step.

    Attributes:
        spans: A loop has only its first pass.
        parts: Part of the model -> seconds on the core, with the sum `seconds`.
        layers: Layer -> seconds, likewise.
        by_bytes: Kind of an operation without cycles -> seconds by nominal rates.
    """

    seconds: float
    spans: list[Span]
    parts: dict[str, float]
    layers: dict[str, float]
    by_bytes: dict[str, float]

    def trace(self) -> str:
        """Returns JSON in Chrome's trace event format, for Perfetto."""
        threads = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": text}}
                   for lane, text in enumerate(_TITLES.values())]
        lanes = [*_TITLES]
        events = [{"ph": "X", "name": span.name, "cat": span.part, "pid": 0, "tid": lanes.index(span.lane),
                   "ts": 1e6 * span.start, "dur": 1e6 * span.seconds,
                   "args": {"part": span.part, "layer": span.layer, "times": span.times}} for span in self.spans]
        return json.dumps({"displayTimeUnit": "ns", "traceEvents": [*threads, *events]})

    def draw(self, parts: dict[str, float], compiled: tuple[int, int], layers: tuple[int, int]) -> bytes:
        """Returns a PNG of this schedule, and of the `parts`, seconds by part of the whole model.

        `compiled` and `layers` are encoder and decoder layers of this schedule and of the whole model.
        """
        names = sorted(parts, key=parts.get)
        palette = matplotlib.colormaps["tab20"]
        busy = [name for name in reversed(names) if name not in (SENT, WAITING)]
        colors = {SENT: "black", WAITING: "silver", **{
            name: palette(2 * place % 20 + place // 10) for place, name in enumerate(busy)}}
        figure, ((time,), (bars,)) = new_figure(14, 2.6 + 0.3 * len(names), 2, height_ratios=(1.6, 0.3 * len(names)))
        lanes = (LINKS, COPIES, CORE)
        for place, lane in enumerate(lanes):
            spans = [span for span in self.spans if span.lane == lane]
            time.broken_barh([(1e3 * span.start, 1e3 * span.seconds * span.times) for span in spans],
                             (place - 0.4, 0.8), facecolors=[colors.get(span.part, "silver") for span in spans])
        time.set_yticks(range(len(lanes)), lanes)
        time.set(xlim=(0, 1e3 * self.seconds), xlabel="ms",
                 title=f"A step of {' + '.join(map(str, compiled))} layers in the order of the compiler's schedule")
        total = sum(parts.values())
        bars.barh(names, [1e3 * parts[name] for name in names], color=[colors[name] for name in names])
        for place, name in enumerate(names):
            bars.text(1e3 * parts[name], place, f" {1e3 * parts[name]:.2f} ms, {parts[name] / total:.0%}", va="center")
        bars.margins(x=0.12)
        bars.set(xlabel="ms",
                 title=f"A step of all {' + '.join(map(str, layers))} layers, {1e3 * total:.2f} ms, by part")
        return png(figure)


def schedule(chip: Chip, module: hlo.Module, sends: dict[str, float], carriers: dict[str, str]) -> Schedule:
    """Predicts the schedule of a step on a chip.

    Args:
        sends: Name of a collective -> seconds of one run.
        carriers: Name of a fusion -> the collective that it starts, continues or awaits.
    """
    seconds, spans = _run(chip, module, sends, carriers, attribute(module), module.entry)
    parts, layers, by_bytes = (collections.defaultdict(float) for _ in range(3))
    for span in spans:
        if span.lane == CORE:
            parts[span.part] += span.seconds * span.times
            layers[span.layer] += span.seconds * span.times
            instruction = module.instructions[span.name]
            if instruction.cycles is None and span.part not in (WAITING, SENT):
                by_bytes[instruction.kind] += span.seconds * span.times
    return Schedule(seconds, spans, dict(parts), dict(layers), dict(by_bytes))


def _run(chip, module, sends, carriers, origins, computation):
    """Returns the seconds of a computation, and its spans from time 0."""
    now, spans, lane_until = 0.0, [], dict.fromkeys(_WAITS, 0.0)
    until = {}  # name -> (end, part of the wait)
    # A collective's last fusion waits for it.
    last_carriers = {*{collective: fusion for fusion, collective in carriers.items()}.values()}

    def add(lane, part, start, seconds):
        spans.append(Span(name, lane, part, origins[name][1], start, seconds))

    def beside(started, seconds, lane):
        start = max(now, lane_until[lane])
        if seconds:
            add(lane, origins[name][0], start, seconds)
        lane_until[lane] = start + seconds
        until[started] = start + seconds, _WAITS[lane]

    def wait_for(started):
        nonlocal now
        end, waiting = until.get(started, (now, WAITING))
        if end > now:
            add(CORE, waiting, now, end - now)
            now = end

    def busy():
        nonlocal now
        if seconds := _seconds(chip, module, instruction):
            add(CORE, origins[name][0], now, seconds)
            now += seconds

    for instruction in module.computations[computation]:
        name, kind = instruction.name, instruction.kind
        if kind.endswith("-done"):
            wait_for(instruction.operands[0])
        elif kind.endswith("-update"):
            until[name] = until.get(instruction.operands[0], (now, WAITING))
        elif collective := carriers.get(name):
            # A collective's first fusion starts it.
            if collective not in until:
                beside(collective, sends[collective], LINKS)
            if instruction.cycles is not None:
                busy()
            if name in last_carriers:
                wait_for(collective)
        elif name in sends:
            beside(name, sends[name], LINKS)
            if not kind.endswith("-start"):
                wait_for(name)
        elif kind in hlo.INNER:
            seconds, inner = max((_run(chip, module, sends, carriers, origins, each)
                                  for each in instruction.called[hlo.INNER[kind]]), key=lambda run: run[0])
            if kind == "call-start":  # such as a collective on a SparseCore
                is_sent = any(span.lane == LINKS for span in inner)
                beside(name, seconds, LINKS if is_sent else COPIES)
                continue
            times = module.loops.get(name) or 1
            spans += [span._replace(start=now + span.start, times=span.times * times) for span in inner]
            now += seconds * times
        elif kind.endswith("-start"):  # a copy moves its smaller end
            moved = min((end.bytes for end in hlo.arrays(instruction.shape)[:2]), default=0)
            beside(name, moved / chip.memory_bandwidth, COPIES)
        elif kind not in hlo.NAMES:
            busy()
    return now, spans


def _seconds(chip, module, instruction):
    """Takes the compiler's cycles, a kernel's own estimate, or its products and bytes."""
    if instruction.cycles is not None:
        return instruction.cycles / chip.clock
    if instruction.kind == "custom-call":
        if _FREE_CALLS.search(instruction.line):
            return 0.0
        if match := _COST.search(instruction.line):
            cost = {name: float(value) for name, value in re.findall(r'"(\w+)":"?(\d+)', match[1])}
            return max(cost.get("flops", 0.0) / chip.flops, cost.get("bytes_accessed", 0.0) / chip.memory_bandwidth)
    operands = [module.instructions[name] for name in set(instruction.operands) if name in module.instructions]
    moved = sum(array.bytes for one in (instruction, *operands) for array in one.written)
    return max(module.product_seconds(instruction, chip), moved / chip.memory_bandwidth)
