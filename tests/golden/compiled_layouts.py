"""What the TPU compiler makes of steps under layouts: collectives, bytes and time on one chip of v5e:2x4, and of pods.

The step is one program, as PJRT trains it.

Run it, or `make golden`, to write compiled_layouts.json anew.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

from switch_tf import Experiment, SwitchConfig
from switch_tf.aot import estimate
from switch_tf.aot.hlo import SENT, WAITING
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.run import Run, StepSettings

# The benchmarks are programs, no package.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "tpu"))
import scale

FILE = pathlib.Path(__file__).with_suffix(".json")
# Of a small model under files of gin/layouts.
LAYOUTS = ("data", "expert", "data_expert", "data_model", "expert_model", "fully_sharded")
SMALL = SwitchConfig(vocab_size=2048, d_model=256, d_ff=512, num_heads=4, d_kv=64, num_encoder_layers=1,
                     num_decoder_layers=1, encoder_sparse_step=1, num_experts=8, num_groups_multiple=8,
                     decoder_sparse_step=0, dropout_rate=0.1)
# Two layers of each stack of a real one, minutes of compiling: preset's experts -> layout.
REAL = {"switch_base_8": (8, "expert"), "switch_base_8, dense twin": (0, "data")}
# Two layers of each stack of what docs/scale.md has, by its commands.
PODS = {run.model: run for run in scale.RUNS if run.model in ("switch_base_128", "switch_xxl_128", "switch_c_2048")}


def measure(name) -> dict:
    """Collectives by kind, bytes of arguments and temporaries, and seconds by the clock: the core's, of pods all."""
    if name in PODS:
        return _measure_pod(PODS[name])
    if name in REAL:
        num_experts, layout = REAL[name]
        config = dataclasses.replace(SwitchConfig.from_preset("switch_base_8"), num_experts=num_experts,
                                     num_encoder_layers=2, num_decoder_layers=2)
        return _measure(config, layout, 128, {"inputs": 512, "targets": 114})
    return _measure(SMALL, name, 32, {"inputs": 128, "targets": 64})


def _measure(config, name, batch_size, lengths):
    layout = gin_syntax.read([f"gin/layouts/{name}.gin"]).part(parts.LAYOUT).make().resolve(8, "TPU")
    experiment = Experiment(config, layout, Run("unused", "unused", lengths, 1, batch_size), StepSettings(),
                            parts.Part(parts.MODEL, {"dtype": "mixed_bfloat16"}),
                            parts.Part(parts.ADAFACTOR, {"learning_rate": 0.01}))
    answer = estimate.make(experiment, "v5e:2x4", is_full=True)
    return {"collectives": answer.collectives,
            **{kind: answer.memory[kind] for kind in ("arguments", "gradients", "temporaries")},
            "core_seconds": sum(seconds for part, seconds in answer.parts.items() if part not in (SENT, WAITING))}


def _measure_pod(run):
    command = scale.process(run._replace(is_full=True), "SwitchConfig.num_encoder_layers=2",
                            "SwitchConfig.num_decoder_layers=2")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    answer = json.loads(done.stdout.splitlines()[-1])
    return {"collectives": answer["collectives"],
            **{kind: answer["bytes_per_device"][kind] for kind in ("arguments", "gradients", "temporaries")},
            "step_seconds": answer["predicted"]["step_seconds"]}


if __name__ == "__main__":
    results = {}
    for name in (*LAYOUTS, *REAL, *PODS):
        print(f"Compiling {name} ...", file=sys.stderr)
        results[name] = measure(name)
    FILE.write_text(json.dumps(results, indent=1) + "\n")
