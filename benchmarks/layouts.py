"""Cost of layouts: the training step under DTensor, PJRT and tf.distribute over the plain one, for the same total work.

    .venv/bin/python benchmarks/layouts.py

T5 1.0 with 8 experts in every other layer, 4 + 4 layers, d_model 256, d_ff 1024, 4 heads of 64, vocabulary 32128,
batches of 8 examples, 256 tokens in and 64 out, 8 groups of tokens, float32, Adafactor. All virtual devices share this
machine's CPU, so nothing becomes faster: a ratio of 1 would be a layout that costs nothing. "plain" is one
`tf.function` with the dispatch that "auto" chooses, "plain/einsum" the same with the dispatch of the layouts; their
ratio is not due to layouts. JSON lines go to standard output, the table and progress to standard error.
"""

import argparse
import sys

import options
import side_by_side
from side_by_side import Comparison
from workers import Contender

BASELINE = "plain/einsum"
SIZES = {"batch": 8, "encoder_length": 256, "decoder_length": 64, "layers": 4, "d_model": 256, "d_ff": 1024,
         "heads": 4, "d_kv": 64, "vocab_size": 32128, "experts": 8, "capacity_factor": 1.25, "learning_rate": 1e-3}
DATA = [["batch", "data"], ["group", "data"]]
EXPERT = [*DATA, ["expert", "data"]]
MODEL = [["heads", "model"], ["mlp", "model"], ["expert_mlp", "model"], ["vocab", "model"]]
FULLY_SHARDED = [["embed", "data"]]
# Name -> devices and the arguments of Layout; each under DTensor and under PJRT.
CUT = {
    "1": (1, {"mesh_shape": "data=1", "rules": DATA}),
    "data=2": (2, {"mesh_shape": "data=2", "rules": DATA}),
    "expert=2": (2, {"mesh_shape": "data=2", "rules": EXPERT}),
    "model=2": (2, {"mesh_shape": "data=1,model=2", "rules": [*DATA, *MODEL]}),
    "expert=4": (4, {"mesh_shape": "data=4", "rules": EXPERT}),
    "expert=8": (8, {"mesh_shape": "data=8", "rules": EXPERT}),
    "expert=2,model=2": (4, {"mesh_shape": "data=2,model=2", "rules": [*EXPERT, *MODEL]}),
    "fully_sharded=4": (4, {"mesh_shape": "data=4", "rules": EXPERT, "at_rest_rules": FULLY_SHARDED}),
}
LAYOUTS = {
    "plain": (1, {}, "auto"),
    BASELINE: (1, {}, "einsum"),
    **{f"{backend}/{name}": (devices, {**layout, "backend": backend}, "einsum")
       for backend in ("dtensor", "pjrt") for name, (devices, layout) in CUT.items()},
    "pjrt/1/auto": (1, {"mesh_shape": "data=1", "backend": "pjrt"}, "auto"),
    "mirrored/2": (2, {"mesh_shape": "data=2", "rules": DATA, "backend": "mirrored"}, "auto"),
}


def main():
    """Reads the arguments, runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=type(size), default=size)
    parser.add_argument("--rounds", type=int, default=10, help="timings of each contender (default 10)")
    parser.add_argument("--contenders", nargs="+", metavar="PATTERN", default=["*"],
                        help="names, or patterns such as 'dtensor/*'; the baseline always takes part")
    args = parser.parse_args()

    job = {**{name: getattr(args, name) for name in SIZES}, "optimizer": "adafactor", "num_groups_multiple": 8}
    contenders = [
        Contender(name, sys.executable, {"build": "switch_tf_step:step_under_layout", "devices": devices,
                                         "layout": layout, "dispatch": dispatch, **job})
        for name, (devices, layout, dispatch) in LAYOUTS.items()]
    tokens = args.batch * (args.encoder_length + args.decoder_length)
    fields = {"benchmark": "layouts", **job, "tokens": tokens}
    side_by_side.run([Comparison("training step under layouts", fields,
                                 options.chosen(contenders, args.contenders, BASELINE), BASELINE)], args.rounds)


if __name__ == "__main__":
    main()
