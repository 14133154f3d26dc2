"""Measures the time that the training loop adds to a step under PJRT, with a program that only waits.

    .venv/bin/python benchmarks/loop.py                          # one process and two, 12 + 12 layers: some minutes
    .venv/bin/python benchmarks/loop.py --layers 1 --before ../older_checkout

A run of `switch-tf train` logs every step. Its compiled program is replaced by one with the same arguments and results
that computes nothing: a call returns at once, and each takes `--milliseconds` of a thread that stands for the device.
So the time between the starts of ten calls over ten times the wait is what the host adds. Processes agree as in a run,
but for the flags that the program itself would carry. JSON lines go to standard output, the table to standard error.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures

import numpy as np

WARM, WINDOW = 10, 10  # steps before the clock starts, and in a window


def main():
    """Runs each number of processes with each checkout, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of the program (default 50)")
    parser.add_argument("--steps", type=int, default=110, help="of a run (default 110)")
    parser.add_argument("--layers", type=int, default=12, help="of each stack (default 12)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=pathlib.Path, help="another checkout to measure in turn")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(args)
        return
    checkouts = {"now": pathlib.Path(__file__).parents[1], **({"before": args.before.resolve()} if args.before else {})}
    measured = {}
    for number in range(args.rounds):
        for count in args.processes:
            for name, checkout in checkouts.items():
                print(f"[round {number + 1} of {args.rounds}: {name}, processes: {count}]", file=sys.stderr, flush=True)
                ratios = _ratios(args, count, checkout)
                measured.setdefault((count, name), []).extend(ratios)
                print(json.dumps({"benchmark": "loop", "contender": name, "processes": count, "layers": args.layers,
                                  "milliseconds": args.milliseconds, "ratios": ratios}), flush=True)
    print(f"\n{WINDOW} steps over {WINDOW} programs of {args.milliseconds:g} ms: median, least and largest",
          file=sys.stderr)
    for (count, name), ratios in measured.items():
        print(f"{name:8}{count} process{'es' * (count > 1)}: {statistics.median(ratios):.3f}  {min(ratios):.3f}  "
              f"{max(ratios):.3f}", file=sys.stderr)


def _ratios(args, count, checkout):
    """Runs the processes. Returns the ratio of each window of the first."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        processes = []
        for index in range(count):
            # Only the first address is used.
            config = {"cluster": {"worker": [address] + ["127.0.0.1:1"] * (count - 1)},
                      "task": {"type": "worker", "index": index}}
            environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu",
                           **({"TF_CONFIG": json.dumps(config)} if count > 1 else {})}
            processes.append(subprocess.Popen(
                [sys.executable, __file__, f"--milliseconds={args.milliseconds}", f"--steps={args.steps}",
                 f"--layers={args.layers}", "--processes", str(count), f"--worker={folder}"],
                env=environment, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        starts = processes[0].stdout.readline()
        for process in processes:
            process.kill()
            process.communicate()
    if not starts:
        sys.exit("The first process ended with an error.")
    starts = json.loads(starts)
    return [(starts[first + WINDOW] - starts[first]) / (WINDOW * args.milliseconds / 1e3)
            for first in range(WARM, len(starts) - WINDOW, WINDOW)]


class _Waiting:
    """A program that waits in its device's thread, one call after another, and returns at once."""

    def __init__(self, program, arguments, args):
        self._program, self._num_features, self._args = program, len(arguments) - len(program.captured), args
        self._device, self._starts = futures.ThreadPoolExecutor(1), []

    def lower(self, *arguments):
        return self

    compile = lower

    def __call__(self, *given):
        end = self._device.submit(self._wait)
        results = [np.full(shape, -1 if np.issubdtype(dtype, np.integer) else 1, dtype)
                   for shape, dtype in self._program.results]
        if len(results) == 1:  # a vector: the index of the bad step is first, flags are last
            results[0][[0, -1]] = -1, 0
        return [_Later(end, value) for value in (
            *results, *(given[self._num_features + index] for index in self._program.updated))]

    def _wait(self):
        self._starts.append(time.perf_counter())
        if len(self._starts) == self._args.steps:
            print(json.dumps(self._starts), flush=True)  # then this process is killed
        time.sleep(self._args.milliseconds / 1e3)


class _Later:
    """An array once a call has ended."""

    is_fully_addressable = True

    def __init__(self, end, value):
        self._end, self._value = end, value._value if isinstance(value, _Later) else value

    def __array__(self, dtype=None, copy=None):
        self._end.result()
        return np.asarray(self._value, dtype)

    def __int__(self):
        return int(np.asarray(self))

    def is_deleted(self):
        return False


def _work(args):
    """Trains in this process with the program that waits. It prints when each call started, in seconds."""
    from switch_tf.cli import main as command
    from switch_tf.partitioning import lowering

    lowering.jit = lambda program, arguments: _Waiting(program, arguments, args)
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_encoder_layers": args.layers,
             "num_decoder_layers": args.layers}
    bindings = [f"--gin.SwitchConfig.{name}={size}" for name, size in sizes.items()]
    command.main(["train", "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin",
                  "--gin_file=gin/runs/pretrain.gin", "--gin_file=gin/layouts/data.gin", "--backend=pjrt", *bindings,
                  f"--gin.MODEL_DIR='{args.worker}/run'", f"--gin.TRAIN_STEPS={1000 * args.steps}",
                  "--gin.BATCH_SIZE=8",
                  "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0", "--gin.CHECKPOINT_PERIOD=1000000"])


if __name__ == "__main__":
    main()
