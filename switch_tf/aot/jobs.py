"""Asks the TPU compiler several questions at the same time, each in a process of its own."""

import concurrent.futures
import json
import os
import re
import subprocess
import time

from switch_tf import environment

# One answer about a model of a usual width takes up to so much.
MEMORY_OF_ONE = 8 * 2**30


def run(questions: dict[str, list[str]], say) -> dict[str, dict]:
    """Runs a process for every question.

    Args:
        questions: name -> command whose last line of output is the JSON object of `result.as_json`, or which ends with
            status 2 and a sentence.
        say: function of a line of text; told each answer, with what remains.

    Returns:
        name -> the JSON object, or {"mistake": sentence} where the question was refused.
    """
    started, answers = time.perf_counter(), {}
    # Not the free memory, which leaves out what only keeps files at hand.
    memory = environment.memory("MemAvailable")
    workers = max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_ONE, len(questions)))
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
