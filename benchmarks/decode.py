"""Greedy decoding in tokens per second, dense and sparse, beside Hugging Face and Flaxformer, on CPU.

    .venv/bin/python benchmarks/decode.py --peer_python ~/peers/bin/python --flaxformer ~/flaxformer

"small" is the model of `train_step.py`: T5 1.0, 4 + 4 layers, d_model 256, d_ff 1024, 4 heads of 64; "base" has the
width of Switch-Base (768, 3072, 12 heads of 64) and 2 + 2 layers. Vocabulary 32128, dense or with 8 or 128 experts in
every other layer, float32; batches of 1, 4 and 32 inputs of 256 tokens, 64 tokens decoded for each, without an end of
sequence. Two factors make the answers of these untrained models, and so the experts of rows, differ
(`contenders/step_problem.py`): "tokens_of_a_step" in the JSON lines is the number of different tokens in a step.
switch_tf runs `model.generate`, "switch_tf/exported/..." the program that `switch-tf export` writes, for batches of any
size. Hugging Face runs its `generate` with a cache, in eager PyTorch, Flaxformer one jitted loop around its cache.
"tensorflow/products" are only the matrix products of the dense model's steps, without the encoder.

"ratio" is the median over rounds of a contender's time over that of `switch_tf/dense`. `--lengths 1` times the first
token: encoder and one step. JSON lines go to standard output, tables and progress to standard error; `peak_mib` is the
process's memory with everything that its libraries take.
"""

import argparse
import sys

import options
import report
import side_by_side
from side_by_side import Comparison
from workers import Contender

BASELINE = "switch_tf/dense"
MODELS = {
    "small": {"layers": 4, "d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"layers": 2, "d_model": 768, "d_ff": 3072, "heads": 12}}
COMMON = {"encoder_length": 256, "d_kv": 64, "vocab_size": 32128, "capacity_factor": 1.25, "decoder_length": 1}


def main():
    """Reads the arguments, runs the comparisons, prints and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 32])
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[64], help="tokens to decode")
    options.add_arguments(parser)
    args = parser.parse_args()

    comparisons = []
    for model in args.models:
        for length in args.lengths:
            for batch in args.batches:
                job = {**MODELS[model], **COMMON, "batch": batch, "max_length": length}
                contenders = options.chosen(_contenders(args, job), args.contenders, BASELINE)
                fields = {"benchmark": "decode", "model": model, **job, "tokens": batch * length}
                comparisons.append(Comparison(f"{model}: {length} tokens of each of {batch}", fields, contenders,
                                              BASELINE))
    results = side_by_side.run(comparisons, args.rounds)
    if args.plot:
        report.plot(results, args.plot, ("model", "max_length"), "batch", "tokens per second", "tokens_per_second")


def _contenders(args, job):
    models = {"dense": {**job, "experts": 0}, **{str(count): {**job, "experts": count} for count in args.experts}}
    ours = [Contender("tensorflow/products", sys.executable, {"build": "decode_products:products", **models["dense"]})]
    for kind in ("", "exported/"):
        ours += [Contender(f"switch_tf/{kind}{name}", sys.executable, {
            "build": "switch_tf_decode:decode", "exported": bool(kind), **own}) for name, own in models.items()]
    return options.with_earlier(args, ours) + options.peers(
        args, flaxformer={
            f"flaxformer/{name}": {"build": "flaxformer_decode:decode", "router": "scatter", **own}
            for name, own in models.items()}, hugging_face={
            f"hugging_face/{name}": {"build": "hugging_face:decode", **own} for name, own in models.items()})


if __name__ == "__main__":
    main()
