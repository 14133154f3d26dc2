"""How fast one core makes packed span-corruption batches: from text, from the cache, and through seqio alone.

    .venv/bin/python benchmarks/data.py --run runs/demo

Batches of 32 sequences of 512 and 114 tokens from the docs corpus, packed and shuffled. The cache is made first, by
`switch-tf cache`, unless it is there. Each reader has a process of its own, held to one core; they are asked in turn,
and the ratio is of the same round. "seqio alone" is `seqio.get_dataset`, as T5X calls it, which keeps the raw text of
so small a corpus in memory. JSON lines go to standard output, the table to standard error.

`--run` adds the share of its training time that a run has waited for data. The last lines are arithmetic: how many
cores a host needs to feed the rates that docs/scale.md predicts, where it reads all rows and where it reads its own.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import side_by_side
from side_by_side import Comparison
from workers import Contender

from switch_tf.training import report as run_report

BASELINE = "switch_tf/text"
READERS = {BASELINE: "text", "switch_tf/cache": "cache", "seqio alone/text": "seqio"}
# Model -> hosts of its pod, and the highest predicted tokens a second, from docs/scale.md; four chips a host of v4 and
# v5p, eight of v5e.
PREDICTED = {
    "Switch-Base, 128 experts, v5e:16x16": (32, 23_386_521), "Switch-XXL, 128 experts, v5p:8x8x8": (128, 2_916_616),
    "Switch-C, 2048 experts, v5p:8x8x8": (128, 16_692_067)}
MOST_PARTS = 8  # of a batch from the cache that are read by themselves


def main():
    """Makes the cache, runs the comparison and prints it with what follows from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timings of each reader (default 7)")
    parser.add_argument("--batches", type=int, default=24, help="batches in a timing (default 24)")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--targets", type=int, default=114)
    parser.add_argument("--core", type=int, default=0, help="the core that all readers share, in turn (default 0)")
    parser.add_argument("--cache_dir", default="runs/benchmark_cache")
    parser.add_argument("--run", type=pathlib.Path, help="a run folder, for the share of time spent waiting")
    args = parser.parse_args()

    subprocess.run([sys.executable, "-m", "switch_tf.cli", "cache", "docs_corpus_span_corruption", "--output",
                    args.cache_dir], check=True, stdout=subprocess.DEVNULL)
    job = {name: getattr(args, name) for name in ("batches", "batch_size", "inputs", "targets", "core", "cache_dir")}
    contenders = [Contender(name, sys.executable, {"build": "data_reading:reading", "reader": reader, **job})
                  for name, reader in READERS.items()]
    tokens = args.batches * args.batch_size * (args.inputs + args.targets)
    fields = {"benchmark": "data", **job, "tokens": tokens}
    results = side_by_side.run([Comparison("packed span corruption on one core", fields, contenders, BASELINE)],
                               args.rounds)
    if args.run:
        _print_waiting(args.run)
    _print_cores({result["contender"]: result["tokens_per_second"] for result in results
                  if "tokens_per_second" in result})


def _print_waiting(folder):
    """The median share of time that a run has waited for its input, without the first logged line."""
    shares = [record["train/input_wait_fraction"] for record in run_report.read_metrics(folder)
              if "train/input_wait_fraction" in record][1:]
    print(json.dumps({"run": str(folder), "input_wait_fraction": statistics.median(shares)}))
    print(f"{folder} waited for data {statistics.median(shares):.2%} of its time (median of {len(shares)} logged "
          "lines)\n", file=sys.stderr)


def _print_cores(rates):
    """Cores a host needs for the predicted rates, at these rates a core."""
    for model, (num_hosts, tokens) in PREDICTED.items():
        cores = {}
        if BASELINE in rates:
            cores["text, all rows"] = tokens / rates[BASELINE]
        if "switch_tf/cache" in rates:
            cores["cache, own rows"] = tokens / min(num_hosts, MOST_PARTS) / rates["switch_tf/cache"]
        told = {name: round(count, 1) for name, count in cores.items()}
        print(json.dumps({"model": model, "hosts": num_hosts, "tokens_per_second": tokens, "cores_a_host": told}))
        print(f"{model}, {num_hosts} hosts, {tokens:,} tokens/s: cores a host needs: "
              + ", ".join(f"{name} {count:,.0f}" for name, count in told.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
