"""What the TPU compiler makes of a small step under each layout: collectives and bytes on one chip of v5e:2x4.

Run it, or `make golden`, to write compiled_layouts.json anew.
"""

import json
import pathlib
import sys

import gin

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.aot.compiler import compile_step
from switch_tf.aot.lower import lower_step
from switch_tf.aot.program import Program
from switch_tf.cli import gin_files
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.collectives import summarize
from switch_tf.partitioning.layout import Layout
from switch_tf.training.run import StepSettings

FILE = pathlib.Path(__file__).with_suffix(".json")
LAYOUTS = ("data", "expert", "data_model", "expert_model", "fully_sharded")  # of gin/layouts


def measure(name) -> dict:
    """Collectives by kind, and bytes of arguments and temporaries, under a layout."""
    gin_files.parse([f"gin/layouts/{name}.gin"])
    layout = gin.get_configurable(Layout)().resolve(8, "TPU")
    config = SwitchConfig(vocab_size=2048, d_model=256, d_ff=512, num_heads=4, d_kv=64, num_encoder_layers=1,
                          num_decoder_layers=1, encoder_sparse_step=1, num_experts=8, num_groups_multiple=8,
                          decoder_sparse_step=0, dropout_rate=0.1)
    lowered = lower_step(SwitchTransformer(config, dtype="mixed_bfloat16"), Adafactor(0.01), layout, 32,
                         {"inputs": 128, "targets": 64}, StepSettings())
    compiled = compile_step(lowered, "v5e:2x4")
    return {"collectives": summarize(Program(compiled.hlo, layout.mesh).collectives),
            "arguments": compiled.memory["arguments"], "temporaries": compiled.memory["temporaries"]}


if __name__ == "__main__":
    results = {}
    for name in LAYOUTS:
        print(f"Compiling {name} ...", file=sys.stderr)
        results[name] = measure(name)
    FILE.write_text(json.dumps(results, indent=1) + "\n")
