"""A whole training step in tokens per second: forward, backward, update; beside Hugging Face and Flaxformer.

    .venv/bin/python benchmarks/train_step.py --peer_python ~/peers/bin/python --flaxformer ~/flaxformer

T5 1.0: 4 + 4 layers, d_model 256, d_ff 1024, 4 heads of 64, vocabulary 32128, dense or with 8 experts in every other
layer at capacity factor 1.25; batches of 8 examples, 256 tokens in and 64 out; float32, no dropout, no jitter.
switch_tf runs the step that its trainer compiles (`training.train_step.compile_steps`), with XLA off and on.
"tensorflow/products" are the matrix products of the dense step alone, the floor for everyone in float32.
Optimizers: AdamW of Keras, PyTorch (fused) and optax; Adafactor of switch_tf, transformers and optax. Hugging Face
counts slots by sequence, the others by batch. "ratio" is the median over rounds of a contender's time over that of
`switch_tf/dense`; tokens are those of both sides, batch * (256 + 64).

`--peer_python` is an environment with torch and transformers (CPU), jax, flax, optax, chex and gin-config; without it,
or without `--flaxformer`, a checkout of google/flaxformer, the peers are left out. JSON lines go to standard output,
tables and progress to standard error.

On a GPU or TPU, by the pjrt back end, with the peers' builds for it; all in bfloat16 with float32 weights, Hugging Face
by autocast:

    .venv/bin/python benchmarks/train_step.py --accelerator --dtype bfloat16 --layers 12 --d_model 768 --d_ff 3072 \
      --heads 12 --batch 16 --encoder_length 512 --decoder_length 128 --dispatches index einsum ...

"TFLOP/s" are those of the model's products in the forward pass and twice as many in the backward pass
(`configs.accounting.flops_per_step`), without empty slots.
"""

import argparse
import dataclasses
import sys

import options
import report
import side_by_side
from side_by_side import Comparison
from workers import Contender

from switch_tf.configs import accounting
from switch_tf.configs.choices import DISPATCHES
from switch_tf.configs.switch_config import SwitchConfig

BASELINE = "switch_tf/dense"
FLOOR = "tensorflow/products"
SIZES = {"batch": 8, "encoder_length": 256, "decoder_length": 64, "layers": 4, "d_model": 256, "d_ff": 1024,
         "heads": 4, "d_kv": 64, "vocab_size": 32128, "experts": 8, "capacity_factor": 1.25, "learning_rate": 1e-3}


def main():
    """Reads the arguments, runs the comparisons, prints and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "adafactor"), default=["adamw", "adafactor"])
    parser.add_argument("--dispatches", nargs="+", choices=DISPATCHES, default=["auto"])
    options.add_accelerator_arguments(parser)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=type(size), default=size)
    options.add_arguments(parser)
    args = parser.parse_args()

    job = {**{name: getattr(args, name) for name in SIZES}, "dtype": args.dtype}
    tokens = args.batch * (args.encoder_length + args.decoder_length)
    comparisons = []
    for optimizer in args.optimizers:
        fields = {"benchmark": "train_step", **job, "tokens": tokens, "optimizer": optimizer}
        contenders = options.chosen(_contenders(args, {**job, "optimizer": optimizer}), args.contenders, BASELINE)
        contenders = [dataclasses.replace(contender, flops=_flops(contender.job)) for contender in contenders]
        comparisons.append(Comparison(f"training step with {optimizer}", fields, contenders, BASELINE))
    results = side_by_side.run(comparisons, args.rounds)
    if args.plot:
        report.plot(results, args.plot, ("optimizer",), "batch", "tokens per second", "tokens_per_second")


def _contenders(args, job):
    dense = {**job, "experts": 0}
    if args.accelerator:
        ours = {"switch_tf/dense": {**dense, "dispatch": "auto"},
                **{f"switch_tf/{dispatch}": {**job, "dispatch": dispatch} for dispatch in args.dispatches}}
        ours = [Contender(name, sys.executable, {"build": "switch_tf_step:step_on_accelerator", **own},
                          on_accelerator=True) for name, own in ours.items()]
        return [*options.with_earlier(args, ours), *_others(args, job, dense)]
    floor = Contender(FLOOR, sys.executable, {"build": "step_products:products", **dense})
    ours = {}
    for xla in (False, True):
        suffix = "/xla" if xla else ""
        ours[f"switch_tf/dense{suffix}"] = {**dense, "dispatch": "auto", "xla": xla}
        for dispatch in args.dispatches:
            ours[f"switch_tf/{dispatch}{suffix}"] = {**job, "dispatch": dispatch, "xla": xla}
    ours = [Contender(name, sys.executable, {"build": "switch_tf_step:step", **own}) for name, own in ours.items()]
    return [floor, *options.with_earlier(args, ours), *_others(args, job, dense)]


def _others(args, job, dense):
    return options.peers(
        args,
        hugging_face={"hugging_face/dense": {"build": "hugging_face:step", **dense},
                      "hugging_face": {"build": "hugging_face:step", **job}},
        flaxformer={"flaxformer/dense": {"build": "flaxformer_step:step", **dense},
                    "flaxformer/scatter": {"build": "flaxformer_step:step", "router": "scatter", **job},
                    "flaxformer/masked": {"build": "flaxformer_step:step", "router": "masked", **job}})


def _flops(job):
    config = SwitchConfig(
        **{name: job[name] for name in ("vocab_size", "d_model", "d_ff", "d_kv")}, num_heads=job["heads"],
        num_encoder_layers=job["layers"], num_decoder_layers=job["layers"], num_experts=job["experts"])
    return accounting.flops_per_step(config, job["batch"], job["encoder_length"], job["decoder_length"])


if __name__ == "__main__":
    main()
