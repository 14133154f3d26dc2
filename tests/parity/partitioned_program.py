"""Runs a lowered step, partitioned by XLA over 8 virtual CPU devices, beside TensorFlow's own step of one device.

A program of its own, because the devices of JAX must be asked for before it starts. Takes the name of a file of
gin/layouts and prints one JSON object: the losses of both, and over all variables the largest difference over the
largest entry.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import keras
import numpy as np
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.aot.lower import lower_step
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import lowering
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.train_step import compile_steps

# A pod's mesh, on 8 devices.
FOR_EIGHT = {
    "pod_256_experts": ["MESH_SHAPE='expert_outer=1,data=2,expert=2,fsdp=2'"],
    "pod_512_fully_sharded": ["MESH_SHAPE='expert=1,expert_x=2,expert_y=1,fsdp_y=1,data_y=1,fsdp=2,data=2'"]}
STEPS, BATCH, LENGTHS = 2, 16, {"inputs": 32, "targets": 16}


def main(name: str) -> dict:
    """Takes a few steps both ways, each from where it stands."""
    jax.config.update("jax_enable_x64", True)  # Keras counts steps in 64 bits
    said = gin_syntax.read([f"gin/layouts/{name}.gin"], [*FOR_EIGHT.get(name, [])])
    layout = said.part(parts.LAYOUT).make().resolve(8, "CPU")
    num_experts = 4 if "fsdp" in layout.mesh else 8  # one a device, where gradients are turned
    config = SwitchConfig(vocab_size=512, d_model=32, d_ff=64, num_heads=4, d_kv=8, num_encoder_layers=1,
                          num_decoder_layers=1, encoder_sparse_step=1, num_experts=num_experts, num_groups_multiple=8,
                          dropout_rate=0.1, expert_dropout_rate=0.1, activation="geglu", logits_via_embedding=False)
    lowered = lower_step(SwitchTransformer(config), Adafactor(0.01), layout, BATCH, LENGTHS, StepSettings())
    mesh = lowering.device_mesh(layout, jax.devices("cpu"))
    arguments, program = lowered.arguments, lowered.program
    shardings = [lowering.named_sharding(mesh, argument.spec) for argument in arguments]
    function = lowering.jit(program, [
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)
        for argument, sharding in zip(arguments, shardings, strict=True)])

    keras.utils.set_random_seed(0)
    model, optimizer = SwitchTransformer(config), Adafactor(0.01)
    Partitioner().build(model, optimizer)
    flag = keras.Variable(0, dtype="int32", name="has_failed")
    variables = {variable.path: variable for variable in [*model.variables, *optimizer.variables, flag]}
    step = compile_steps(model, optimizer, 0, StepSettings())
    state = {argument.name: variables[argument.name].numpy() for argument in arguments if argument.kind != "feature"}

    losses, largest = [], 0.0
    for number in range(STEPS):
        features = _features(number, config.vocab_size)
        values = {**{name: value[None] for name, value in features.items()}, **state}
        results = [np.asarray(value) for value in function(*(
            jax.device_put(values[argument.name], sharding)
            for argument, sharding in zip(arguments, shardings, strict=True)))]
        (bad_step, _, *found), *updated = results
        measured, own_bad_step = step({name: tf.constant(value[None]) for name, value in features.items()})
        assert bad_step == own_bad_step == -1
        expected = np.concatenate([np.ravel(value) for value in tf.nest.flatten(measured)])
        # The program returns total and weight of each Mean, and this one is the first.
        losses.append((float(measured.batch.loss_terms["cross_entropy"].value), float(found[0] / found[1])))
        assert np.allclose(expected, found, rtol=1e-5), (expected, found)
        for index, value in zip(program.updated, updated, strict=True):
            name = arguments[index - len(program.captured)].name
            state[name] = value
            own = variables[name].numpy()
            difference = np.abs(own - value)
            largest = max(largest, float(np.max(difference) / max(np.max(np.abs(own)), 1e-30)))
    return {"losses": losses, "largest_difference": largest}


def _features(seed, vocab_size):
    random = np.random.RandomState(seed)
    inputs, targets = (random.randint(1, vocab_size, (BATCH, length)) for length in LENGTHS.values())
    inputs[:5, 20:] = 0
    targets[3:9, 11:] = 0
    features = {"encoder_input_tokens": inputs, "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
                "decoder_target_tokens": targets, "decoder_loss_weights": targets > 0}
    return {name: value.astype(np.int32) for name, value in features.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
