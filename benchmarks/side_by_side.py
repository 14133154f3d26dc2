"""Times programs side by side: each in its own process, all alive together, run in turn and never two at once.

A single number means little on a shared machine. So every round runs each contender once, the order moves on by one
from round to round, and the result is the median over rounds of each contender's time over the baseline's of the same
round.

This file is the harness; the commands are `benchmarks/moe_layer.py`, `train_step.py`, `checkpoints.py` and others.
"""

import dataclasses
import statistics
import sys
import time
from concurrent import futures

import report
from workers import LeftOut, Worker, available_mib

# Thread pools spin for some milliseconds after their last task; the next contender starts after that.
PAUSE_SECONDS = 0.02
MEMORY_MARGIN_MIB = 1024


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Contenders that do the same work, and their baseline.

    Args:
        title: Title of the table.
        fields: Copied into every result; "tokens" is the number of tokens in one run.
        contenders: Contenders.
        baseline: Name of the contender that the others are compared with.
    """

    title: str
    fields: dict
    contenders: list
    baseline: str


class Progress:
    """Prints progress and the estimated time left on standard error."""

    def __init__(self, comparisons, rounds):
        contenders = [contender for comparison in comparisons for contender in comparison.contenders
                      if contender.python is not None]
        self._left = {"start": len(contenders), "turn": len(contenders) * rounds}
        self._seconds = {"start": [], "turn": []}
        self._last_line = 0.0

    def did(self, kind, seconds):
        """Counts one "start" or one "turn"."""
        self._seconds[kind].append(seconds)
        self._left[kind] = max(0, self._left[kind] - 1)

    def drop(self, turns):
        """Removes the turns of a contender that has dropped out."""
        self._left["turn"] = max(0, self._left["turn"] - turns)

    def say(self, text, always=True):
        """Prints a line. With `always=False`, not within ten seconds of the last one."""
        if not always and time.monotonic() - self._last_line < 10:
            return
        self._last_line = time.monotonic()
        eta = "not known yet"
        if all(self._seconds.values()):
            seconds = sum(statistics.mean(self._seconds[kind]) * left for kind, left in self._left.items())
            eta = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        print(f"[{text}; ETA {eta}]", file=sys.stderr, flush=True)


def run(comparisons: list[Comparison], rounds: int) -> list[dict]:
    """Runs the comparisons one after the other; prints each when it is done and returns all results."""
    progress, results = Progress(comparisons, rounds), []
    for comparison in comparisons:
        rows = compare(comparison, rounds, progress)
        report.print_lines(rows)
        report.print_table(f"{comparison.title} (ratio to {comparison.baseline})", rows)
        results += rows
    return results


def compare(comparison: Comparison, rounds: int, progress: Progress) -> list[dict]:
    """Runs one comparison; one result for each contender, in their order.

    Where the machine's memory does not hold all contenders together, they come in several sittings, each with the
    baseline. Contenders on an accelerator are built all at once, because they compile for a minute each.
    """
    results = {contender.name: {**comparison.fields, "contender": contender.name, "note": contender.note}
               for contender in comparison.contenders}
    waiting = [contender for contender in comparison.contenders if contender.python is not None]
    waiting.sort(key=lambda contender: contender.name != comparison.baseline)
    workers, at_least = {}, 1
    try:
        while waiting:
            if all(contender.on_accelerator for contender in waiting):
                with futures.ThreadPoolExecutor(len(waiting)) as pool:
                    list(pool.map(lambda one: _start(one, workers, results, progress, comparison.title, rounds),
                                  waiting))
                waiting = []
            while waiting and (len(workers) < at_least or _has_room(workers)):
                _start(waiting.pop(0), workers, results, progress, comparison.title, rounds)
            samples = _take_turns(workers, results, progress, comparison.title, rounds)
            baseline_seconds = samples.get(comparison.baseline, [])
            for name, worker in workers.items():
                # The baseline's own line is that of the first sitting.
                if "median_seconds" not in results[name]:
                    measured = _measured(samples[name], baseline_seconds, worker, comparison.fields["tokens"])
                    results[name].update(measured)
            for name in [name for name in workers if name != comparison.baseline]:
                workers.pop(name).stop()
            at_least = len(workers) + 1
    finally:
        for worker in workers.values():
            worker.stop()
    return list(results.values())


def _start(contender, workers, results, progress, title, rounds):
    """Starts a worker, or notes in its result why there is none."""
    progress.say(f"{title}: starting {contender.name}")
    started = time.monotonic()
    try:
        workers[contender.name] = Worker(contender)
    except LeftOut as reason:
        results[contender.name]["note"] = str(reason)
        progress.drop(rounds)
    progress.did("start", time.monotonic() - started)


def _take_turns(workers, results, progress, title, rounds):
    """Times every worker once in each round; returns name -> seconds of each round."""
    samples = {name: [] for name in workers}
    for number in range(rounds if workers else 0):
        names = list(workers)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.monotonic()
            try:
                samples[name].append(workers[name].time())
            except LeftOut as reason:
                results[name]["note"] = str(reason)
                workers.pop(name).stop()
                progress.drop(rounds - number)
                continue
            time.sleep(PAUSE_SECONDS)
            progress.did("turn", time.monotonic() - started)
        if not workers:
            break
        progress.say(f"{title}: round {number + 1} of {rounds}", always=number + 1 == rounds)
    return samples


def _measured(seconds, baseline_seconds, worker, tokens):
    """Returns the numbers of one contender."""
    paired = [own / base for own, base in zip(seconds, baseline_seconds, strict=False)]
    median = statistics.median(seconds)
    return {
        "median_seconds": median, "min_seconds": min(seconds), "ratio": statistics.median(paired) if paired else None,
        "tokens_per_second": tokens / median, **_rate(worker.contender.flops, median),
        "seconds": [round(second, 6) for second in seconds],
        "peak_mib": worker.peak_mib, "peak_growth_mib": round(worker.peak_mib - worker.ready_mib, 1), **worker.facts}


def _rate(flops, seconds):
    return {} if flops is None else {"tflops_per_second": flops / seconds / 1e12}


def _has_room(workers):
    """Whether memory has room for one more worker and for one at work, at the largest peak so far."""
    largest = max(worker.peak_mib for worker in workers.values())
    return available_mib() > 2 * largest + MEMORY_MARGIN_MIB
