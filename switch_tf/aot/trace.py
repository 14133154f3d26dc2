"""A schedule as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json

from switch_tf.aot.clock import COPIES, CORE, LINKS, Schedule

_LANES = {CORE: "core", COPIES: "copies between memories", LINKS: "links to other chips"}


def chrome(schedule: Schedule) -> str:
    """JSON of Chrome's trace event format; of a loop the first pass is shown, as long as one pass takes."""
    threads = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": text}}
               for lane, text in enumerate(_LANES.values())]
    lanes = [*_LANES]
    events = [{"ph": "X", "name": span.name, "cat": span.part, "pid": 0, "tid": lanes.index(span.lane),
               "ts": 1e6 * span.start, "dur": 1e6 * span.seconds,
               "args": {"part": span.part, "layer": span.layer, "times": span.times}} for span in schedule.spans]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": [*threads, *events]})
