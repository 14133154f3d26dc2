"""Large models on the pods that hold them: what the TPU compiler makes of each, and of its dense twin.

    .venv/bin/python benchmarks/scale.py [--output docs/scale.md]

Each is one question to `switch-tf compile`, minutes of compiling; answers are kept, so that a run that was cut off goes
on, and a repeated one is instant. JSON lines go to standard output, progress to standard error, the tables to --output.
"""

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

from switch_tf.cli import compile_many, compile_text

GIB = 2**30
KINDS = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")


class Run(NamedTuple):
    """`model`, `layout`: gin files; `topology`; `bindings`: text of further bindings; `note`: what it is; `is_full`:
    whether all layers are compiled."""

    model: str
    layout: str
    topology: str
    bindings: tuple[str, ...]
    note: str
    is_full: bool = False


RUNS = (
    Run("switch_base_128", "pod_256", "v5e:16x16", ("BATCH_SIZE=1024",), "Switch-Base, 128 experts"),
    Run("switch_large_128", "pod_256", "v5e:16x16", ("BATCH_SIZE=2048",), "Switch-Large, 128 experts"),
    Run("switch_xxl_128", "pod_512", "v5p:8x8x8", ("BATCH_SIZE=2048",), "Switch-XXL, 128 experts"),
    Run("switch_c_2048", "pod_512_experts", "v5p:8x8x8", ("BATCH_SIZE=2048",), "Switch-C, 2048 experts"),
    Run("gshard_600b", "expert", "v4:8x16x16", ("BATCH_SIZE=8192",), "GShard, 2048 experts, top-2"))
YARDSTICK = Run(
    "dense_encoder_500b", "fully_sharded_model", "v4:8x16x16",
    ("MESH_SHAPE='data=32,model=64'", "BATCH_SIZE=448", "TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 512}"),
    "dense encoder",
    is_full=True)  # with few layers the compiler has room, and keeps more of each than it can of all


def words(run: Run, is_dense: bool) -> list[str]:
    """The command line after "switch-tf compile"."""
    files = [f"models/{run.model}", "tasks/c4", "runs/pretrain", f"layouts/{run.layout}"]
    bindings = [*run.bindings, *(["NUM_EXPERTS=0"] if is_dense else [])]
    return [*(f"--gin_file=gin/{file}.gin" for file in files), f"--topology={run.topology}",
            *(["--full"] if run.is_full else []), *(f"--gin.{binding}" for binding in bindings)]


def main():
    """Asks everything and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write the tables there, as docs/scale.md")
    arguments = parser.parse_args()
    questions = {(run, is_dense): words(run, is_dense) for run in RUNS for is_dense in (False, True)}
    questions[YARDSTICK, True] = words(YARDSTICK, False)
    names = {f"{run.model}{' (dense twin)' if is_dense and run is not YARDSTICK else ''}": key
             for key in questions for run, is_dense in [key]}
    found = compile_many.ask({name: questions[key] for name, key in names.items()}, compile_text.say)
    for name, result in found.items():
        print(json.dumps({"benchmark": "scale", "name": name, **result}))
    if refused := {name: result for name, result in found.items() if "predicted" not in result}:
        raise SystemExit(f"No answer: {refused}")
    if arguments.output:
        arguments.output.write_text(page({key: found[name] for name, key in names.items()}))
        print(f"Written: {arguments.output}", file=sys.stderr)


def page(results) -> str:
    """docs/scale.md."""
    sparse = [(run, results[run, False], results[run, True]) for run in RUNS]
    yardstick = results[YARDSTICK, True]
    low, high = yardstick["predicted"]["model_flops_utilization"]
    recomputed = 4 / 3  # the forward pass once more
    return TEXT.format(
        runs=_table(["model", "parameters", "pod, mesh", "tokens a batch", "compiled of layers"], [
            [run.note, f"{result['num_parameters'] / 1e9:,.1f}B", _pod(result), f"{_tokens(result):,.0f}",
             _depth(result)]
            for run, result, _ in (*sparse, (YARDSTICK, yardstick, None))]),
        memory=_table(["model", "weights", "slots", "temporaries", "program", "needed", "chip has"], [
            [name, *(f"{size / GIB:.2f}" for size in _memory(result))] for name, result in _rows(sparse, yardstick)]),
        sent=_table(["model", *KINDS, "warnings"], [
            [name, *(_sent(result, kind) for kind in KINDS), "; ".join(result["warnings"]) or "none"]
            for name, result in _rows(sparse, yardstick)]),
        time=_table(["model", "compute", "memory", "links", "step", "tokens/s", "MFU"], [
            [name, *_time(result)] for name, result in _rows(sparse, yardstick)]),
        twins=_table(["model", "parameters of its twin", "times as many", "step over the twin's"], [
            [run.note, f"{twin['num_parameters'] / 1e9:,.2f}B",
             f"{result['num_parameters'] / twin['num_parameters']:.0f}",
             "{:.2f} to {:.2f}".format(*sorted(mine / other for mine, other in zip(
                 result["predicted"]["step_seconds"], twin["predicted"]["step_seconds"], strict=True)))]
            for run, result, twin in sparse]),
        low=low, high=high, low_recomputed=low * recomputed, high_recomputed=high * recomputed,
        commands="\n".join("switch-tf compile " + " ".join(_quoted(word) for word in words(run, False))
                           for run in (*RUNS, YARDSTICK)))


def _rows(sparse, yardstick):
    for run, result, twin in sparse:
        yield run.note, result
        yield "&nbsp; its dense twin", twin
    yield YARDSTICK.note, yardstick


def _pod(result):
    return f"{result['topology']}, " + ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items())


def _tokens(result):
    return result["predicted"]["tokens_per_second"][0] * result["predicted"]["step_seconds"][1]


def _depth(result):
    both = " and ".join(f"{encoder}+{decoder}" for encoder, decoder in result["compiled_layers"])
    return f"{both} of {'+'.join(map(str, result['layers']))}"


def _memory(result):
    memory = result["bytes_per_device"]
    return [*(memory[kind] for kind in ("weights", "slots", "temporaries", "code", "needed")), result["chip_bytes"]]


def _sent(result, kind):
    entry = result["collectives"].get(kind)
    return f"{entry['count']} ({entry['bytes'] / 2**20:,.0f} MiB)" if entry else "0"


def _time(result):
    predicted = result["predicted"]
    yield from (f"{1e3 * predicted[part]:.1f}" for part in ("compute_seconds", "memory_seconds", "links_seconds"))
    yield "{:.1f} to {:.1f}".format(*(1e3 * seconds for seconds in predicted["step_seconds"]))
    yield "{:,.0f} to {:,.0f}".format(*predicted["tokens_per_second"])
    yield "{:.0%} to {:.0%}".format(*predicted["model_flops_utilization"])


def _table(header, rows):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def _quoted(word):
    return f'"{word}"' if any(mark in word for mark in "'{ ") else word


TEXT = """# Trillions on paper

What the compiler for TPUs makes of one training step of the largest models, on pods that hold them. **Nothing here ran
on a TPU.** This page is written by `benchmarks/scale.py`, which asks `switch-tf compile`; the commands are at the end.
Memory and collectives are the compiler's own, of the depths named and extrapolated linearly to all layers
([compile](compile.md) says how well that holds). Times are predictions from nominal rates: FLOPs over peak, traffic
over bandwidth, bytes over links.

{runs}

Weights are float32, computation is in bfloat16, the optimizer is Adafactor with factored slots, so that state is little
more than four bytes a parameter. A chip's share of it, in GiB:

{memory}

## What is sent

Number in a step, and bytes of the results on one chip. Experts cost four all-to-alls a sparse layer: there and back, in
the forward and in the backward pass. No stack of experts is gathered anywhere: all-gathers bring together the parts of
tokens that chips of the model axis sent to the same experts, and in the dense encoder the weights that it stores in
pieces. Reduce-scatters are their counterpart in the other pass, and collective-permutes do either, piece by piece,
while a product goes on.

{sent}

## How long a step may take

Milliseconds: what each part would take alone; a step between all parts at the same time and links after the rest.

{time}

An all-to-all over a whole pod is dear: each byte crosses, on average, a quarter of the torus along each dimension.

## Sparse and dense

The twin has the sizes of one expert in place of all, and so about the same FLOPs for each token (two experts for
GShard's). "Times as many" parameters cost "step over the twin's" time, on the same pod with the same batch.

{twins}

## A yardstick

Google reported for an encoder of 480B parameters, in TensorFlow and partitioned by GSPMD, 63 % of the peak of 2,048 TPU
v4 chips, counting the forward pass that rematerialisation repeats. Our encoder of 0.5T parameters, also with
rematerialisation, is predicted between {low:.0%} and {high:.0%} without that pass and between {low_recomputed:.0%} and
{high_recomputed:.0%} with it, which tells how far to trust the predictions above.

## The commands

```sh
{commands}
```
"""

if __name__ == "__main__":
    main()
