"""One sparse layer, forward and forward with backward, beside its floors and the layers of other packages.

    .venv/bin/python benchmarks/moe_layer.py --peer_python ~/peers/bin/python --flaxformer ~/flaxformer

Other questions:

    .venv/bin/python benchmarks/moe_layer.py --experts 8 --tokens 1024 4096 16384 65536 --contenders 'switch_tf/*'
    .venv/bin/python benchmarks/moe_layer.py --memory
    .venv/bin/python benchmarks/moe_layer.py --matrix_products --passes forward_backward
    .venv/bin/python benchmarks/moe_layer.py --accelerator --dtype bfloat16 --experts 8 128   # GPU or TPU

Contenders: `SwitchFeedForward` with every `dispatch`, XLA off and, where shapes are fixed, on; the floors
`switch_tf/dense` (the dense layer on the same tokens) and `tensorflow/experts` (the stacked products alone, on buffers
of the same capacity); Hugging Face (PyTorch) and Flaxformer (JAX), each with a dense layer of its own. All get the same
tokens, N(0, 1), the same router kernel, N(0, 1 / d_model), the same groups and the same slots, floor(1.25 * tokens of
a group / experts) and at least 4; top-1, float32, no jitter, no dropout. Hugging Face counts slots by sequence, so a
group is a sequence; Flaxformer is given groups that its own rule would cut smaller (`contenders/flaxformer_setup.py`).
The backward pass is that of sum(outputs * constant) + 1e-2 * load-balancing loss + 1e-3 * router z-loss, to the inputs
and every weight. "ratio" is the median over rounds of a contender's time over that of `switch_tf/dense`.

`--peer_python` is an environment with torch and transformers (CPU), jax, flax, optax, chex and gin-config; without it,
or without `--flaxformer`, a checkout of google/flaxformer, the peers are left out. JSON lines go to standard output,
tables and progress to standard error.
`--memory` measures, in a fresh process for each, how far the resident set rises over what it was before the layer was
built, while forward and backward run at 65,536 tokens: in groups of 4,096 and in a single one.
"""

import argparse
import dataclasses
import sys

import options
import report
import side_by_side
from contenders.layer_problem import expert_capacity
from side_by_side import Comparison
from workers import Contender, measure_memory, total_mib

from switch_tf.configs.choices import DISPATCHES

BASELINE = "switch_tf/dense"
EXPERTS = "tensorflow/experts"
FIXED_SHAPES = ("index", "einsum")  # what XLA can compile
MEMORY_TOKENS = 65536


def main():
    """Reads the arguments, runs the comparisons, prints and draws them."""
    args = _arguments()
    results = _memory(args) if args.memory else _timings(args)
    if args.plot:
        along = "tokens" if len(args.tokens) > 1 else "experts"
        if args.memory:
            report.plot(results, args.plot, ("tokens", "group_size"), "experts", "MiB over the start", "over_start_mib")
        elif along == "tokens":
            report.plot(results, args.plot, ("pass", "experts"), along, "seconds", "median_seconds")
        else:
            report.plot(results, args.plot, ("pass", "tokens"), along, f"time over that of {BASELINE}", "ratio")


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", help="default 1 8 32 128; 8 with --memory")
    parser.add_argument("--tokens", type=int, nargs="+", help="default 4096; 65536 with --memory")
    parser.add_argument("--group_size", type=int, nargs="+",
                        help="tokens of a group at most; default 4096, with --memory also all tokens in one")
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--d_ff", type=int, default=2048)
    parser.add_argument("--capacity_factor", type=float, default=1.25)
    parser.add_argument("--passes", nargs="+", choices=("forward", "forward_backward"),
                        default=["forward", "forward_backward"])
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--matrix_products", action="store_true",
                        help="time the experts' products alone, in every way there is to compute them")
    options.add_accelerator_arguments(parser)
    options.add_arguments(parser)
    args = parser.parse_args()
    args.experts = args.experts or ([8] if args.memory else [1, 8, 32, 128])
    args.tokens = args.tokens or [MEMORY_TOKENS if args.memory else 4096]
    args.group_size = args.group_size or ([4096, max(args.tokens)] if args.memory else [4096])
    for tokens in args.tokens:
        for group_size in args.group_size:
            if tokens > group_size and tokens % group_size:
                parser.error(f"{tokens} tokens cannot be cut into groups of {group_size}.")
    return args


def _job(args, experts, tokens, group_size, one_pass):
    """Returns the job of every contender."""
    group_tokens = min(tokens, group_size)
    return {"experts": experts, "num_groups": tokens // group_tokens, "group_tokens": group_tokens,
            "d_model": args.d_model, "d_ff": args.d_ff, "capacity_factor": args.capacity_factor,
            "capacity": expert_capacity(group_tokens, args.capacity_factor, experts), "pass": one_pass,
            "dtype": args.dtype, **({"accelerator": True} if args.accelerator else {})}


def _contenders(args, job):
    """Returns all contenders for a job."""
    ours = {"switch_tf/dense": {"build": "switch_tf_layer:dense", "xla": False}}
    if not args.accelerator:
        ours |= {"switch_tf/dense/xla": {"build": "switch_tf_layer:dense", "xla": True},
                 EXPERTS: {"build": "switch_tf_layer:experts", "is_looped": False, "xla": False}}
    for dispatch in FIXED_SHAPES if args.accelerator else DISPATCHES:
        for xla in (False, True) if dispatch in FIXED_SHAPES and not args.accelerator else (False,):
            ours[f"switch_tf/{dispatch}" + ("/xla" if xla else "")] = {
                "build": "switch_tf_layer:switch", "dispatch": dispatch, "xla": xla}
    others = options.peers(
        args,
        hugging_face={"hugging_face/dense": {"build": "hugging_face:dense", **job},
                      "hugging_face": {"build": "hugging_face:layer", **job}},
        flaxformer={"flaxformer/dense": {"build": "flaxformer_layer:dense", **job},
                    "flaxformer/scatter": {"build": "flaxformer_layer:layer", "router": "scatter", **job},
                    "flaxformer/masked": {"build": "flaxformer_layer:layer", "router": "masked", **job}})
    ours = [Contender(name, sys.executable, {**own, **job}, on_accelerator=args.accelerator)
            for name, own in ours.items()]
    return options.with_earlier(args, ours) + others


def _matrix_products(job):
    """Returns contenders for the experts' stacked products, in every way that TensorFlow computes them on a CPU."""
    ways = {EXPERTS: ({}, {}), f"{EXPERTS}/looped": ({"is_looped": True}, {}),
            f"{EXPERTS}/xla": ({"xla": True}, {}), f"{EXPERTS}/looped/xla": ({"is_looped": True, "xla": True}, {}),
            f"{EXPERTS}/without oneDNN": ({}, {"TF_ENABLE_ONEDNN_OPTS": "0"}),
            f"{EXPERTS}/BFC allocator": ({}, {"TF_CPU_ALLOCATOR_USE_BFC": "1"})}
    return [Contender(name, sys.executable, {
        "build": "switch_tf_layer:experts", "is_looped": False, "xla": False, **way, **job}, environment=environment)
        for name, (way, environment) in ways.items()]


def _timings(args):
    comparisons = []
    for group_size in args.group_size:
        for tokens in args.tokens:
            for experts in args.experts:
                for one_pass in args.passes:
                    job = _job(args, experts, tokens, group_size, one_pass)
                    title = (f"{experts} experts, {tokens:,} tokens in groups of {job['group_tokens']:,}, "
                             f"{one_pass.replace('_', ' and ')}")
                    fields = {"benchmark": "moe_layer", "tokens": tokens, **job}
                    if args.matrix_products:
                        contenders, baseline = _matrix_products(job), EXPERTS
                    else:
                        contenders, baseline = _contenders(args, job), BASELINE
                    contenders = options.chosen(contenders, args.contenders, baseline)
                    comparisons.append(Comparison(title, fields, contenders, baseline))
    return side_by_side.run(comparisons, args.rounds)


def _memory(args):
    results = []
    for group_size in args.group_size:
        for tokens in args.tokens:
            for experts in args.experts:
                job = _job(args, experts, tokens, group_size, "forward_backward")
                title = f"memory: {experts} experts, {tokens:,} tokens in groups of {job['group_tokens']:,}"
                fields = {"benchmark": "moe_layer_memory", "tokens": tokens, "group_size": group_size, **job}
                contenders = options.chosen(_contenders(args, job), args.contenders, BASELINE)
                rows = [measure_memory(_unless_too_large(contender), fields) for contender in contenders]
                report.print_lines(rows)
                report.print_table(title, rows)
                results += rows
    return results


def _unless_too_large(contender):
    """Returns the contender, with a note if its masks alone would fill half of the machine's memory."""
    job = contender.job
    if job.get("dispatch") != "einsum" and job.get("router") != "masked":
        return contender
    mask_gib = job["num_groups"] * job["group_tokens"] * job["experts"] * job["capacity"] * 4 / 2**30
    machine_gib = total_mib() / 1024
    if 2 * mask_gib <= machine_gib / 2:
        return contender
    note = (f"left out: its masks, to dispatch and to combine by, would take {mask_gib:,.0f} GiB each, together more "
            f"than half of this machine's {machine_gib:,.0f} GiB")
    return dataclasses.replace(contender, python=None, note=contender.note or note)


if __name__ == "__main__":
    main()
