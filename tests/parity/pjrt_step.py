"""Compares the step that the pjrt back end trains with the one that is compiled ahead of time, and with one device.

A program of its own, because JAX's devices are started once in a process. Takes the name of a file of gin/layouts,
the kind of device that the steps are traced for and the dtype policy. Prints one JSON object: whether both programs
have the same operations, how many products of bfloat16 numbers have float32 results, and the losses of both back
ends. CPUs run what is traced for GPUs.
"""

import collections
import json
import re
import sys

import keras
import numpy as np
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.aot import lower
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.run import StepSettings
from switch_tf.hardware import devices
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import backends, lowering
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.train_step import compile_steps

STEPS, BATCH, LENGTHS = 2, 16, {"inputs": 32, "targets": 32}
CONFIG = SwitchConfig(vocab_size=512, d_model=32, d_ff=64, num_heads=4, d_kv=8, num_encoder_layers=1,
                      num_decoder_layers=0, encoder_sparse_step=1, num_experts=8, num_groups_multiple=8,
                      dropout_rate=0.1)


def main(name: str, kind: str, dtype: str) -> dict:
    """Takes a few steps with both back ends."""
    count = 1 if name == "single" else 8
    devices.split_cpu(count)
    said = gin_syntax.read([f"gin/layouts/{name}.gin"], ["Layout.backend='pjrt'"])
    layout = said.part(parts.LAYOUT).make().resolve(count, "CPU")
    partitioner = backends.create_partitioner(layout)
    lowered, lower_once = [], lowering.lower

    def recorded(*arguments):
        lowered.append(lower_once(*arguments))
        return lowered[-1]

    lowering.lower = recorded
    with devices.supposed(kind, "of a test"):
        losses = _train(partitioner, dtype)
        compiled = lower.lower_step(SwitchTransformer(CONFIG, dtype=dtype), Adafactor(0.01), layout, BATCH, LENGTHS,
                                    StepSettings())
    own, ahead = (_without_names(module) for module in (lowered[0].module, compiled.program.module))
    narrow = len(re.findall(r"stablehlo\.dot.*xbf16>, tensor<\S*bf16>\) -> tensor<\S*f32>", compiled.text))
    return {"is_same": own == ahead, "narrow": narrow, "losses": losses, "expected": _train(Partitioner(), dtype)}


def _train(partitioner, dtype):
    keras.utils.set_random_seed(0)
    model, optimizer = SwitchTransformer(CONFIG, dtype=dtype), Adafactor(0.01)
    partitioner.build(model, optimizer)
    step, losses = compile_steps(model, optimizer, 0, StepSettings(), partitioner), []
    for number in range(STEPS):
        random = np.random.RandomState(number)
        features = {feature: random.randint(1, CONFIG.vocab_size, spec.shape, "int32")
                    for feature, spec in lower.feature_specs(CONFIG, BATCH, LENGTHS).items()}
        measured, _ = step(partitioner.place({feature: tf.constant(value) for feature, value in features.items()}))
        losses.append(float(np.asarray(measured.batch.loss_terms["cross_entropy"].value)))
    return losses


def _without_names(module):
    """Returns the number of operations of each text, without names, which TensorFlow counts up in a process.

    The words of a text are sorted, since the order of a condition's variables differs from trace to trace.
    """
    lines = [re.sub(r"[%@][\w.#:]+", "%", line.partition(" loc(")[0]) for line in lowering.text(module).splitlines()
             if not line.startswith(("#loc", "module @"))]
    return collections.Counter(" ".join(sorted(re.split(r"[ ,()]+", line))) for line in lines)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
