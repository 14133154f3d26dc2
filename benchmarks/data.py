"""Speed of packed span-corruption batches on one core: from text, from the cache, and through seqio alone.

    .venv/bin/python benchmarks/data.py --run runs/demo

Batches of 32 sequences of 512 and 114 tokens from the docs corpus, packed and shuffled. `switch-tf cache` first makes
the cache if there is none. Each reader has its own process in every round, on one core, and no two run at once: a
waiting pipeline would read ahead and then seem faster than it is. "seqio alone" is `seqio.get_dataset`, as T5X calls
it, which keeps the raw text of a small corpus in memory. JSON lines go to
standard output, the table to standard error; rates are medians over rounds, of tokens that are not padding.

`--run` adds the share of its training time that a run has waited for data. The last lines are arithmetic: how many
cores a host needs to feed the rates that docs/scale.md predicts, where it reads all rows and where it reads its own.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import tqdm

from switch_tf.reporting import report

READERS = {"switch_tf, text": "text", "switch_tf, cache": "cache", "seqio alone, text": "seqio"}
# Model -> hosts of its pod, and predicted tokens per second, from docs/scale.md; a host has four chips of v5p or eight
# of v5e.
PREDICTED = {
    "Switch-Base, 128 experts, v5e:16x16": (32, 18_536_181), "Switch-XXL, 128 experts, v5p:8x8x8": (128, 2_903_995),
    "Switch-C, 2048 experts, v5p:8x8x8": (128, 5_477_468)}


def main():
    """Makes the cache, takes the rounds, and prints them with what follows from them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each reader (default 3)")
    parser.add_argument("--warm", type=int, default=10, help="batches before the clock starts (default 10)")
    parser.add_argument("--batches", type=int, default=60, help="batches on the clock (default 60)")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--targets", type=int, default=114)
    parser.add_argument("--core", type=int, default=0, help="the core that all readers share, in turn (default 0)")
    parser.add_argument("--cache_dir", default="runs/benchmark_cache")
    parser.add_argument("--run", type=pathlib.Path, help="a run folder, for the share of time spent waiting")
    args = parser.parse_args()
    shares = _shares_of_waiting(args.run, parser) if args.run else []

    subprocess.run([sys.executable, "-m", "switch_tf.cli", "cache", "docs_corpus_span_corruption", "--output",
                    args.cache_dir], check=True, stdout=subprocess.DEVNULL)
    job = {name: getattr(args, name) for name in ("warm", "batches", "batch_size", "inputs", "targets", "core",
                                                  "cache_dir")}
    rounds = _rounds(job, args.rounds)
    rates = _print_rates(rounds, job)
    if shares:
        print(json.dumps({"run": str(args.run), "input_wait_fraction": statistics.median(shares)}))
        print(f"\n{args.run} waited for data {statistics.median(shares):.2%} of its time (median of {len(shares)} "
              "logged lines)", file=sys.stderr)
    _print_cores(rates)


def _shares_of_waiting(folder, parser):
    """Returns the shares of time that a run waited for its input, without the first logged one, the start."""
    shares = [record["train/input_wait_fraction"] for record in report.read_metrics(folder)
              if "train/input_wait_fraction" in record][1:]
    if not shares:
        parser.error(f"{folder} holds no metrics.jsonl with several logged lines of training.")
    return shares


def _rounds(job, count):
    """Measures each reader in each round. The order moves on by one from round to round."""
    names, measurements = list(READERS), {name: [] for name in READERS}
    worker = pathlib.Path(__file__).parent / "contenders" / "data_reading.py"
    with tqdm.tqdm(total=count * len(names), desc="reading", unit=" processes") as progress:
        for number in range(count):
            for name in names[number % len(names):] + names[:number % len(names)]:
                done = subprocess.run([sys.executable, str(worker), json.dumps({"reader": READERS[name], **job})],
                                      check=True, capture_output=True, text=True)
                measurements[name].append(json.loads(done.stdout.splitlines()[-1]))
                progress.update()
    return measurements


def _print_rates(rounds, job):
    """Prints the table; returns reader -> tokens a CPU second."""
    slots, rates = job["batches"] * job["batch_size"] * (job["inputs"] + job["targets"]), {}
    print(f"\n{'reader':20}{'tokens a CPU second':>22}{'tokens/s on the clock':>24}{'first batch':>14}{'peak':>12}",
          file=sys.stderr)
    for name, measured in rounds.items():
        rate, on_clock = (statistics.median(slots * one["share_filled"] / one[key] for one in measured)
                          for key in ("cpu_seconds", "seconds"))
        first, peak = (statistics.median(one[key] for one in measured) for key in ("seconds_to_first", "peak_mib"))
        rates[name] = rate
        print(json.dumps({"benchmark": "data", "reader": name, **job, "tokens_per_cpu_second": rate,
                          "tokens_per_second": on_clock, "rounds": measured}))
        print(f"{name:20}{rate:22,.0f}{on_clock:24,.0f}{first:12.1f} s{peak:8,.0f} MiB", file=sys.stderr)
    return rates


def _print_cores(rates):
    """Prints the cores that a host needs for the predicted rates, given the rates of one core."""
    print(file=sys.stderr)
    for model, (num_hosts, tokens) in PREDICTED.items():
        cores = {"text, all rows": tokens / rates["switch_tf, text"],
                 "cache, all rows": tokens / rates["switch_tf, cache"],
                 "cache, own rows": tokens / num_hosts / rates["switch_tf, cache"]}
        rounded = {name: round(count, 1) for name, count in cores.items()}
        print(json.dumps({"model": model, "hosts": num_hosts, "tokens_per_second": tokens, "cores_a_host": rounded}))
        print(f"{model}, {num_hosts} hosts, {tokens:,} tokens/s; cores a host needs: "
              + ", ".join(f"{name} {count:,.1f}" for name, count in rounded.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
