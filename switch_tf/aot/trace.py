"""Trace of a schedule for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json

from switch_tf.aot.clock import COPIES, CORE, LINKS, Schedule

_LANES = {CORE: "core", COPIES: "copies between memories", LINKS: "links to other chips"}


def chrome(schedule: Schedule) -> str:
    """Returns JSON in Chrome's trace event format. A loop shows its first pass only."""
    threads = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": text}}
               for lane, text in enumerate(_LANES.values())]
    lanes = [*_LANES]
    events = [{"ph": "X", "name": span.name, "cat": span.part, "pid": 0, "tid": lanes.index(span.lane),
               "ts": 1e6 * span.start, "dur": 1e6 * span.seconds,
               "args": {"part": span.part, "layer": span.layer, "times": span.times}} for span in schedule.spans]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": [*threads, *events]})
