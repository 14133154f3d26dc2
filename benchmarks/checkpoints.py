"""The time of training steps with checkpoints over that without, written while training goes on and before it does.

    .venv/bin/python benchmarks/checkpoints.py --period 100 --rounds 5
    .venv/bin/python benchmarks/checkpoints.py --latency 0.05

Each contender runs windows of `--period` steps (CHECKPOINT_PERIOD) of a sparse T5 with Adafactor. "asynchronous" starts
to save at the beginning of each window, as a run does; a save waits for the one before it. "synchronous" waits for
each checkpoint before it goes on. "ratio" is the median over rounds of a window's time over that of "none".
"blocked" are seconds in which training stands still, and "commit" those until the checkpoint is complete on disk, both
of the last window before the rounds. "peak" is the memory of the process. With --latency checkpoints go into a bucket
of the store that the tests use, a process of this machine that answers each request so many seconds later.

JSON lines go to standard output, tables and progress to standard error. The defaults take about a minute.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import side_by_side
from side_by_side import Comparison
from workers import Contender

BASELINE = "none"
SERVER = pathlib.Path(__file__).parents[1] / "tests" / "bucket" / "server.py"
SIZES = {"batch": 4, "encoder_length": 128, "decoder_length": 32, "layers": 2, "d_model": 256, "d_ff": 1024,
         "heads": 4, "d_kv": 64, "vocab_size": 32128, "experts": 16, "capacity_factor": 1.25, "learning_rate": 1e-3}


def main():
    """Reads the arguments, runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", type=int, default=10, help="steps between checkpoints (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each contender (default 3)")
    parser.add_argument("--optimizer", choices=("adamw", "adafactor"), default="adafactor")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder for checkpoints, on a disk to measure")
    parser.add_argument("--latency", type=float, metavar="SECONDS", help="save into a bucket with this latency")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=type(size), default=size)
    args = parser.parse_args()

    with contextlib.nullcontext(args.folder) if args.latency is None else _bucket(args.latency) as folder:
        _compare(args, folder)


@contextlib.contextmanager
def _bucket(latency):
    """Yields a folder of a bucket that this process's children can reach."""
    with tempfile.TemporaryDirectory() as place:
        server = subprocess.Popen([sys.executable, SERVER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  text=True)
        os.environ.update(json.loads(server.stdout.readline()))
        control = f"{os.environ['https_proxy']}/_control?latency={latency}"
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(control).close()
        yield "gs://bucket/benchmark"
        server.communicate("")


def _compare(args, folder):
    job = {name: getattr(args, name) for name in (*SIZES, "period", "optimizer", "latency")}
    job["folder"] = folder
    job |= {"build": "saving:window", "dispatch": "auto"}
    kinds = {BASELINE: (False, False), "asynchronous": (True, False), "synchronous": (True, True)}
    contenders = [Contender(name, sys.executable, {**job, "saves": saves, "waits": waits})
                  for name, (saves, waits) in kinds.items()]
    tokens = args.period * args.batch * (args.encoder_length + args.decoder_length)
    fields = {"benchmark": "checkpoints", **job, "tokens": tokens}
    side_by_side.run([Comparison(f"{args.period} steps and a checkpoint", fields, contenders, BASELINE)], args.rounds)


if __name__ == "__main__":
    main()
