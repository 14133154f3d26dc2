"""Runs several questions to the TPU compiler at the same time, each in its own process."""

import concurrent.futures
import json
import os
import re
import subprocess
import time
from collections.abc import Callable

from switch_tf.hardware import host

# Enough for a model of a usual width.
MEMORY_OF_A_JOB = 8 * 2**30


def run(questions: dict[str, list[str]], say: Callable[[str], None]) -> dict[str, dict]:
    """Runs a process for every question, as many at a time as cores and memory allow.

    Args:
        questions: Name -> command. Its last line of output is the JSON object of `result.as_json`, or it exits with
            status 2 and a sentence.
        say: Prints a line after each answer, with the time left.

    Returns:
        Name -> JSON object, or {"mistake": sentence} for a refused question.

    Raises:
        RuntimeError: A process failed.
    """
    started, answers = time.perf_counter(), {}
    # Free memory would not count the page cache, which can be reclaimed.
    memory = host.memory("MemAvailable")
    workers = max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_A_JOB, len(questions)))
    running = set()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_run, command, running): name for name, command in questions.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                name = futures[future]
                answers[name] = future.result()
                elapsed = time.perf_counter() - started
                left = elapsed / len(answers) * (len(questions) - len(answers))
                say(f"[{len(answers)} of {len(questions)}] {name}: {_in_short(answers[name])}; {elapsed:.0f} s, "
                    + (f"about {left:.0f} s left." if left else "done."))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
    return {name: answers[name] for name in questions}


def _run(command, running):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.add(process)
    try:
        output, error = process.communicate()
    finally:
        running.discard(process)
    if output:
        return json.loads(output.splitlines()[-1])
    last = (error.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
    if process.returncode != 2:
        raise RuntimeError(f"`{' '.join(command)}` failed: {error[-4000:]}")
    return {"mistake": re.sub(r"^switch-tf [\w-]+: ", "", last)}


def _in_short(answer):
    if "predicted" not in answer:
        return f"refused ({answer['mistake']})" if "mistake" in answer else "does not fit"
    seconds = answer["predicted"]["step_seconds"]
    return f"{1e3 * seconds:.1f} ms a step, {'fits' if answer['fits'] else 'does not fit'}"
