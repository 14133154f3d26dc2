"""One contender in a process of its own: builds its function, then times it whenever a line on standard input asks.

`python worker.py '{"build": "switch_tf_layer:switch", ...}'` imports the named file of this folder and calls the named
function with the job, the rest of the JSON object. It returns `(run, facts)`: a function that does the work once and
returns when the work is done, and a dictionary to print. Every answer is one JSON line on standard output:

* once the function is built and warm, a line with the facts and what building cost;
* for each line "time", the seconds of one run: the mean of as many as fill `SECONDS_PER_ANSWER`;
* instead of any of these, `{"left_out": "a sentence"}` where the contender cannot run.

Between two questions the process sleeps in a read. Libraries that print do so on standard error.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback

SECONDS_PER_ANSWER = 0.05
WARM_UP_RUNS = 2


def main():
    """Answers questions until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])

    def answer(**content):
        answers.write(json.dumps({**content, "peak_mib": peak_mib()}) + "\n")
        answers.flush()

    try:
        run, facts = warm(job)
        answer(**facts)
        for question in sys.stdin:
            if question.strip() != "time":
                raise ValueError(f"The only question is 'time', not {question!r}.")
            answer(seconds=timed(run))
    except ImportError as error:
        answer(left_out=f"left out: {sys.executable} cannot import what it needs ({error})")
    except Exception as error:  # Whatever a library raises becomes a note in the table; the traceback is in the log.
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        answer(left_out=f"failed: {reason[:200]}")


def warm(job):
    """Builds the job's function and runs it until nothing is traced or compiled any more."""
    file, _, name = job.pop("build").partition(":")
    build = getattr(importlib.import_module(file), name)
    before = current_mib()
    started = time.perf_counter()
    run, facts = build(job)
    run()
    first = time.perf_counter() - started
    for _ in range(WARM_UP_RUNS):
        run()
    return run, {**facts, "build_seconds": round(first, 2), "before_build_mib": before}


def timed(run):
    """Returns the mean seconds of one run."""
    runs, started = 0, time.perf_counter()
    while True:
        run()
        runs += 1
        elapsed = time.perf_counter() - started
        if elapsed >= SECONDS_PER_ANSWER:
            return elapsed / runs


def peak_mib():
    """Returns the largest resident set of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def current_mib():
    """Returns the present resident set of this process (Linux)."""
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) * resource.getpagesize() / 2**20, 1)


if __name__ == "__main__":
    main()
