"""Kills a small run again and again at random moments, on a disk and in a bucket, and counts what was lost.

    .venv/bin/python tests/reliability/faults.py [--kills 50] [--stores disk bucket] [--seed N]

`make faults` runs it. Each run is killed at a random moment, several times, until it ends by itself; then its logged
numbers and the hash of its weights are compared with those of a run that nobody killed. Equal numbers mean that no
example was lost or repeated, because each step logs its loss. The tally has the kills by what the run was doing.
Exit status 1 if anything differs.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from tqdm import tqdm

from switch_tf.checkpoints import folders
from switch_tf.storage import places

SERVER = pathlib.Path(__file__).parents[1] / "bucket" / "server.py"
STEPS = 60
ARGUMENTS = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin",
    "--gin_file=gin/layouts/single.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64", "--gin.SwitchConfig.num_heads=2",
    "--gin.SwitchConfig.num_encoder_layers=1", "--gin.SwitchConfig.num_decoder_layers=1",
    "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.SwitchConfig.decoder_sparse_step=1", "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=10", "--gin.CHECKPOINT_PERIOD=3",
    "--gin.Run.eval_batches=1", "--gin.BEST_METRIC='eval/docs_corpus_span_corruption/loss'",
    f"--gin.TRAIN_STEPS={STEPS}"]
_CLOCKS = ("per_second", "seconds_per_step", "utilization", "wait_fraction")
_LONGEST = 25.0  # seconds from the start of a process to its kill
_KILLS_OF_A_RUN = 5


def main():
    """Runs the kills and prints the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="on each store (default 50)")
    parser.add_argument("--stores", nargs="+", choices=("disk", "bucket"), default=["disk", "bucket"])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    print(f"seed {arguments.seed}", file=sys.stderr)
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        local = pathlib.Path(folder)
        expected = _result(_finish(local / "straight", local), local / "straight")
        for store in arguments.stores:
            with contextlib.nullcontext(local) if store == "disk" else _bucket(local) as root:
                kills, runs, different = _kill(root, local, expected, arguments.kills, rng, store)
            differ += different
            by_moment = ", ".join(f"{count} {moment}" for moment, count in kills.most_common())
            print(f"{store}: {kills.total()} kills in {runs} runs ({by_moment}); {different} runs differ from the one "
                  "that was not killed.", flush=True)
            print(json.dumps({"benchmark": "faults", "store": store, "kills": dict(kills), "runs": runs,
                              "different": different, "seed": arguments.seed}), flush=True)
    sys.exit(bool(differ))


@contextlib.contextmanager
def _bucket(local):
    """Yields a folder of a bucket, which this process and its children reach."""
    server = subprocess.Popen([sys.executable, SERVER, local], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.environ.update(json.loads(server.stdout.readline()) | {"GCS_STAT_CACHE_MAX_AGE": "0"})
    control = f"{os.environ['https_proxy']}/_control"
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(control).close()
    yield places.at("gs://bucket")
    server.communicate("")


def _kill(root, local, expected, count, rng, store):
    """Returns the kills by moment, the number of runs, and how many of these have another result."""
    kills, runs, different = collections.Counter(), 0, 0
    with tqdm(total=count, desc=store, unit=" kills", file=sys.stderr) as progress:
        while kills.total() < count:
            run = root / f"run_{store}_{runs}"
            runs += 1
            for _ in range(min(_KILLS_OF_A_RUN, count - kills.total())):
                moment = _kill_once(run, local, rng.uniform(0, _LONGEST))
                if moment is None:  # it ended before
                    break
                kills[moment] += 1
                progress.update()
            result = _result(_finish(run, local), run)
            if result != expected:
                different += 1
                print(f"{run} differs: {_first_difference(result, expected)}", file=sys.stderr)
    return kills, runs, different


def _start(run, local):
    command = [sys.executable, "-m", "switch_tf.cli", "train", *ARGUMENTS, f"--gin.MODEL_DIR='{run}'"]
    return subprocess.Popen(command, cwd=local, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(run, local):
    """Trains to the end; returns what was told."""
    process = _start(run, local)
    _, told = process.communicate()
    if process.returncode:
        raise RuntimeError(told)
    return told


def _kill_once(run, local, seconds):
    """Kills a process after some seconds; returns what the run was doing, or None if it had ended."""
    process = _start(run, local)
    try:
        process.communicate(timeout=seconds)
        return None
    except subprocess.TimeoutExpired:
        moment = _moment(run)
        process.send_signal(signal.SIGKILL)
        _, told = process.communicate()
    return moment if "Compiling" in told or "Tracing" in told else "while it started"


def _moment(run):
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        return "before the first checkpoint"
    names = {entry.name for entry in checkpoints.iterdir() if entry.name.startswith(("step_", "tmp.step_"))}
    if names - {folders.path_of(checkpoints, step).name for step in folders.steps(checkpoints)}:
        return "while it saved"
    return "between checkpoints" if names else "before the first checkpoint"


def _result(told, run):
    """Returns the logged numbers but those of clocks, the hash of the last weights, and the best step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [{name: value for name, value in line.items() if not name.endswith(_CLOCKS)} for line in lines]
    checkpoints = run / "checkpoints"
    return numbers, folders.hash_of_weights(folders.path_of(checkpoints, STEPS)), folders.best(checkpoints)


def _first_difference(result, expected):
    for found, line in zip(result[0], expected[0], strict=False):
        if found != line:
            return f"{found} and not {line}"
    return (len(result[0]), *result[1:]), (len(expected[0]), *expected[1:])


if __name__ == "__main__":
    main()
