"""Kills, damages and starves a small run again and again, on a disk and in a bucket, and counts what was lost.

    .venv/bin/python -m tests.reliability.faults [--kills 50] [--faults kill damage ...] [--seed N]

`make faults` runs it. However often a run is stopped, its logged numbers, the hash of its last weights and its best
step must be those of a run that nobody stopped. Each step logs its loss, so equal numbers mean that no example was lost
or repeated. A start must also go on from the last checkpoint that was complete. The tally counts the faults by the
moment that they hit, such as a save. Exit status 1 if anything differs.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from tqdm import tqdm

from switch_tf import statuses
from switch_tf.checkpoints import folders
from switch_tf.storage import places
from tests.reliability.small_run import ON_ONE_DEVICE, STEPS, Process, lines_of

SERVER = pathlib.Path(__file__).parents[1] / "bucket" / "server.py"
PERIODS = ("--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=10", "--gin.CHECKPOINT_PERIOD=3",
           "--gin.BEST_METRIC='eval/docs_corpus_span_corruption/loss'")
ALONE = (*ON_ONE_DEVICE, *PERIODS)
IN_TWO_PROCESSES = ("--gin_file=gin/layouts/fully_sharded.gin", "--devices=2", "--processes=2", "--backend=pjrt",
                    "--gin.SwitchConfig.vocab_size=4096", *PERIODS)
WELL = {"fail": 0, "fail_reads": 0, "latency": 0}  # settings of the bucket
_STARTING, _FAR = 8.0, 25  # seconds of a start; steps to a kill
_KILLS_OF_A_RUN = 5
_LONGEST_END = 120  # seconds in which the other process must end after one was killed

# Makes one gradient of one step a NaN. The arguments are the step and the index of the gradient.
WITH_NAN = """
import sys
import tensorflow as tf
from switch_tf.cli import main
from switch_tf.training import train_step

compute, fold_gradients, steps = train_step.compute_gradients, train_step.fold_gradients, []

def computing(model, features, seed, step, *rest, **options):
    steps.append(step)
    return compute(model, features, seed, step, *rest, **options)

def with_nan(gradients, variables):
    gradients = fold_gradients(gradients, variables)
    index = int(sys.argv[2]) % len(gradients)
    is_bad = tf.equal(steps[-1], tf.cast(int(sys.argv[1]), steps[-1].dtype))
    gradients[index] = tf.where(is_bad, float("nan"), gradients[index])
    return gradients

train_step.compute_gradients, train_step.fold_gradients = computing, with_nan
sys.exit(main.main(sys.argv[3:]))
"""


class Store(NamedTuple):
    """A place for runs.

    Attributes:
        name: "disk" or "bucket".
        root: Path of a folder.
        local: Path of a folder of this machine.
        control: Function that changes the bucket: failures, latency.
    """

    name: str
    root: Any
    local: pathlib.Path
    control: Callable[..., None] | None = None


class Tally:
    """Counts of faults, by the moment of the run that they hit, and of losses.

    Args:
        name: Words for the fault and the store.
        count: Number of faults to try.
    """

    def __init__(self, name: str, count: int):
        self.name, self.moments = name, collections.Counter()
        self.steps_lost, self.wrong, self.runs = 0, [], 0
        self._progress = tqdm(total=count, desc=name, unit=" faults", file=sys.stderr)

    def add(self, moment: str) -> None:
        self.moments[moment] += 1
        self._progress.update()

    def check_start(self, told: str, saved: list[int]) -> None:
        """Counts the steps that a start has lost of the checkpoints that were complete."""
        found = re.search(r"^Going on from step (\d+) ", told, re.MULTILINE)
        self.steps_lost += max(saved, default=0) - (int(found[1]) if found else 0)

    def check_result(self, run: Any, told: str, expected: tuple) -> None:
        """Compares a run that has ended with the one that nobody stopped."""
        self.runs += 1
        if (result := _result(run)) != expected:
            self.wrong.append(f"{run}: {_first_difference(result, expected)}\n{told}")

    def close(self) -> bool:
        """Prints the tally. Returns whether anything is wrong."""
        self._progress.close()
        moments = ", ".join(f"{count} {moment}" for moment, count in self.moments.most_common())
        print(f"{self.name}: {self.moments.total()} in {self.runs} runs ({moments}); {self.steps_lost} steps lost of "
              f"complete checkpoints, {len(self.wrong)} runs differ.", flush=True)
        print(json.dumps({"benchmark": "faults", "name": self.name, "moments": dict(self.moments), "runs": self.runs,
                          "steps_lost": self.steps_lost, "different": len(self.wrong)}), flush=True)
        for text in self.wrong:
            print(text, file=sys.stderr)
        return bool(self.wrong or self.steps_lost)


def main():
    """Runs the faults and prints the tally of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="on each store (default 50)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--stores", nargs="+", choices=("disk", "bucket"), default=["disk", "bucket"])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr)
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        local = pathlib.Path(folder)
        _finish(local / "straight", local)
        expected = _result(local / "straight")
        for name in arguments.stores:
            with _disk(local) if name == "disk" else _bucket(local) as store:
                for fault in arguments.faults:
                    rng = random.Random(f"{arguments.seed} {name} {fault}")
                    for tally in FAULTS[fault](store, arguments.kills, rng, expected):
                        is_wrong |= tally.close()
    sys.exit(is_wrong)


@contextlib.contextmanager
def _disk(local):
    yield Store("disk", local, local)


@contextlib.contextmanager
def _bucket(local):
    """Yields a bucket, which this process and its children reach."""
    server = subprocess.Popen([sys.executable, SERVER, local], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.environ.update(json.loads(server.stdout.readline()) | {"GCS_STAT_CACHE_MAX_AGE": "0"})

    def control(**settings):
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{os.environ['https_proxy']}/_control?{query}").close()

    yield Store("bucket", places.at("gs://bucket"), local, control)
    server.communicate("")


def kill(store, count, rng, expected):
    """Kills the process at random moments."""

    def strike(process, tally, moment):
        process.popen.send_signal(signal.SIGKILL)
        process.end()

    yield _strike(Tally(f"kills, {store.name}", count), count, store, rng, expected, ALONE, strike)


def lose_a_process(store, count, rng, expected):
    """Kills one of two processes at random moments. The other one must end by itself, as an outage."""
    if store.name != "disk":  # the processes meet through the same files
        return
    count = max(1, count // 5)
    _finish(store.root / "straight_2", store.local, IN_TWO_PROCESSES)

    def strike(process, tally, moment):
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.popen.pid)], capture_output=True,
                                  text=True).stdout.split()
        if children:  # none has started, or all have ended
            os.kill(int(rng.choice(children)), signal.SIGKILL)
        status = process.end(_LONGEST_END)
        if children and status in (statuses.FINISHED, statuses.BUG):
            tally.wrong.append(f"A run ended with status {status} {moment}:\n{process.told}")

    yield _strike(Tally(f"lost processes, {store.name}", count), count, store, rng,
                  _result(store.root / "straight_2"), IN_TWO_PROCESSES, strike)


def _strike(tally, count, store, rng, expected, arguments, strike):
    """Stops runs by `strike`, each up to five times, and compares what they end with. Returns the tally."""
    while tally.moments.total() < count:
        run = store.root / f"struck_{arguments is ALONE}_{tally.runs}"
        for _ in range(min(_KILLS_OF_A_RUN, count - tally.moments.total())):
            saved = _saved(run)
            process = Process(run, store.local, arguments)
            if not _wait_for_a_moment(process, rng, saved):
                break
            moment = _moment(process, run)
            strike(process, tally, moment)
            if "Going on" in process.told:
                tally.check_start(process.told, saved)
            tally.add(moment)
        _finish_and_check(tally, run, store, expected, arguments)
    return tally


def make_a_nan(store, count, rng, expected):
    """Makes one gradient of one step a NaN: the run ends as diverged, and goes on without that."""
    count = max(1, count // 10)
    tally = Tally(f"NaN in a gradient, {store.name}", count)
    for index in range(count):
        run, step = store.root / f"nan_{index}", rng.randrange(STEPS)
        process = Process(run, store.local, ALONE, ("-c", WITH_NAN, str(step), str(rng.randrange(1000))))
        status = process.end()
        if status != statuses.DIVERGED or f"gradient of step {step + 1} is not finite" not in process.told:
            tally.wrong.append(f"{run} ended with status {status} at step {step + 1}:\n{process.told}")
        tally.add("while it stepped")
        _finish_and_check(tally, run, store, expected)
    yield tally


def damage(store, count, rng, expected):
    """Damages each file of the last checkpoint in each way: the run goes on from the one before it."""
    prepared, half = store.local / f"prepared_{store.name}", STEPS // 2
    _finish(prepared, store.local, (*ALONE, f"--gin.TRAIN_STEPS={half}"))
    last, before = (folders.path_of(pathlib.Path("checkpoints"), step) for step in (half, half - 3))
    names = sorted(file.name for file in (prepared / last).iterdir())
    cases = [(name, kind) for name in names for kind in ("truncated", "flipped", "swapped", "missing")]
    tally = Tally(f"damaged files, {store.name}", len(cases))
    for name, kind in cases:
        copy = store.local / f"copy_{store.name}"
        shutil.copytree(prepared, copy)
        _damage(copy / last / name, kind, (copy / before / name).read_bytes())
        run = copy if store.name == "disk" else store.root / f"damaged_{tally.runs}"
        if run != copy:
            places.upload(copy, run)
        told = _finish(run, store.local)
        # Without its description a folder of a bucket is no checkpoint, so nothing is said about it.
        is_gone = store.name == "bucket" and (name, kind) == (folders.DESCRIPTION, "missing")
        is_passed_over = "Trying the one before it" in told
        if f"Going on from step {half - 3} " not in told or is_passed_over == is_gone:
            tally.wrong.append(f"{name} {kind}:\n{told}")
        tally.add(kind)
        tally.check_result(run, told, expected)
        shutil.rmtree(copy)
    yield tally


def _damage(file, kind, other):
    content = file.read_bytes()
    if kind == "missing":
        file.unlink()
        return
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]
    file.write_bytes({"truncated": content[:middle], "flipped": flipped, "swapped": other}[kind])


def starve(store, count, rng, expected):
    """Lets the bucket fail, or take its time."""
    if store.name == "disk":
        return
    for index, (name, settings, seconds) in enumerate((
            ("30 % of calls fail", {"fail": 0.3, "fail_reads": 0.3}, None),
            ("all calls fail for a minute", {"fail": 1, "fail_reads": 1}, 60),
            ("a latency of 200 ms", {"latency": 0.2}, None))):
        run, tally = store.root / f"starved_{index}", Tally(f"{name}, {store.name}", 1)
        process = Process(run, store.local, ALONE)
        if seconds:
            _wait_for_step(process, rng.randrange(STEPS // 2))
        store.control(**settings)
        moment = _moment(process, run) if seconds else "all the time"
        if seconds:
            time.sleep(seconds)
            store.control(**WELL)
        status = process.end()
        store.control(**WELL)
        if status not in (statuses.FINISHED, statuses.OUTAGE):
            tally.wrong.append(f"{run} ended with status {status}:\n{process.told}")
        tally.add(f"{moment}, which ended it" if status == statuses.OUTAGE else moment)
        _finish_and_check(tally, run, store, expected)
        yield tally


FAULTS = {"kill": kill, "lose_a_process": lose_a_process, "nan": make_a_nan, "damage": damage, "starve": starve}


def _finish(run, local, arguments=ALONE):
    """Trains to the end; returns what was told."""
    process = Process(run, local, arguments)
    if status := process.end():
        raise RuntimeError(f"{run} ended with status {status}:\n{process.told}")
    return process.told


def _finish_and_check(tally, run, store, expected, arguments=ALONE):
    saved = _saved(run)
    try:
        told = _finish(run, store.local, arguments)
    except RuntimeError as error:
        tally.wrong.append(str(error))
        return
    tally.check_start(told, saved)
    tally.check_result(run, told, expected)


def _saved(run):
    return folders.steps(run / "checkpoints")


def _wait_for_a_moment(process, rng, saved):
    """Returns at a random moment, or with False if the process has ended before."""
    draw = rng.random()
    if draw < 0.15:
        return _sleep(process, rng.uniform(0, _STARTING))
    if draw < 0.25:
        while process.is_running() and "Writing the report" not in process.told:
            time.sleep(0.01)
        return _sleep(process, rng.uniform(0, 0.5))
    first = min(max(saved, default=0) + 1, STEPS)
    _wait_for_step(process, rng.randint(first, min(first + _FAR, STEPS)))
    return _sleep(process, rng.uniform(0, 0.15))


def _wait_for_step(process, step):
    while process.is_running() and _last_step(process.told) < step:
        time.sleep(0.005)


def _last_step(told):
    return max(map(int, re.findall(r"^step (\d+)/\d+  loss", told, re.MULTILINE)), default=-1)


def _sleep(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.popen.wait(seconds)
    return process.is_running()


def _moment(process, run):
    """Returns what a run is doing."""
    told = process.told
    if not re.search("Compiling|Tracing", told):
        return "while it started"
    if "Writing the report" in told:
        return "while it reported"
    if (step := _last_step(told)) < 0:
        return "while it compiled"
    if _is_saving(process, run):
        return "while it saved"
    if step % 10 == 0 and not re.search(rf"^step {step}/\d+  eval/", told, re.MULTILINE):
        return "while it evaluated"
    return "while it stepped"


def _is_saving(process, run):
    if not places.is_local(run):  # its files are written here first
        return any(pathlib.Path(tempfile.gettempdir()).glob(f"switch_tf.*.{process.popen.pid}.*"))
    return any(entry.name.startswith("tmp.step_") for entry in (run / "checkpoints").iterdir())


def _result(run):
    """Returns the logged numbers but those of clocks, the hash of the last weights, and the best step."""
    checkpoints = run / "checkpoints"
    return lines_of(run), folders.hash_of_weights(folders.path_of(checkpoints, STEPS)), folders.best(checkpoints)


def _first_difference(result, expected):
    for found, line in zip(result[0], expected[0], strict=False):
        if found != line:
            return f"{found} and not {line}"
    return (len(result[0]), *result[1:]), (len(expected[0]), *expected[1:])


if __name__ == "__main__":
    main()
