"""Computes a small model's loss, logits and gradients with the Keras back end that the environment chooses.

As a program, takes cases as POLICY:DISPATCH and prints one JSON object: case -> what was computed.
"""

import json
import sys

import keras
import numpy as np

from switch_tf import SwitchConfig, SwitchTransformer, decoding, losses
from switch_tf.ops import random


def measure(policy: str, dispatch: str) -> dict:
    """In training, with dropout and jitter from one seed: "loss" and "gradients"; without them: "logits".

    And "ids", what hash routing, whose decoder has experts, decodes in three ways.
    """
    config = SwitchConfig(
        vocab_size=32, d_model=8, d_ff=16, d_kv=4, num_heads=2, num_encoder_layers=1, num_decoder_layers=1,
        num_experts=3, encoder_sparse_step=1, decoder_sparse_step=1, num_groups_multiple=2, min_expert_capacity=1,
        dropout_rate=0.1, expert_dropout_rate=0.1, routing_policy=policy, allow_non_causal_decoder=True,
        num_selected_experts=3 if policy == "top_n" else None, dispatch=dispatch)
    model = SwitchTransformer(config)
    model.build()
    random = np.random.RandomState(0)
    for variable in model.variables:
        variable.assign(random.normal(size=variable.shape) * 0.5)
    features = {"encoder_input_tokens": random.randint(1, 32, (4, 6)).astype("int32"),
                "decoder_input_tokens": random.randint(1, 32, (4, 4)).astype("int32")}
    features["encoder_input_tokens"][1, 3:] = 0
    differentiate = _with_jax if keras.backend.backend() == "jax" else _with_tensorflow
    value, gradients = differentiate(model, features)
    logits = model.forward(features)[0]
    samplers = (decoding.Greedy(), decoding.Sample(top_k=20, top_p=0.9, seed=3), decoding.Beam(3))
    ids = [np.asarray(model.generate(features["encoder_input_tokens"], 5, sampler)).tolist() for sampler in samplers
           ] if policy == "hash" else []
    return {"loss": float(value), "logits": np.asarray(logits).tolist(), "ids": ids,
            "gradients": [np.asarray(gradient).ravel().tolist() for gradient in gradients]}


def _with_jax(model, features):
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # they take longer than what they save
    rest = [variable.value for variable in model.non_trainable_variables]

    def loss(values):
        with random.random_seed(7):
            return _loss(*model.stateless_call(values, rest, features, training=True, return_router_stats=True)[0],
                         features)

    return jax.jit(jax.value_and_grad(loss))([variable.value for variable in model.trainable_variables])


def _with_tensorflow(model, features):
    import tensorflow as tf

    with random.random_seed(7), tf.GradientTape() as tape:
        value = _loss(*model.forward(features, training=True), features)
    return value, tape.gradient(value, [variable.value for variable in model.trainable_variables])


def _loss(logits, router_stats, features):
    targets = features["decoder_input_tokens"]
    cross_entropy, z_loss, _ = losses.cross_entropy(logits, targets, np.ones(targets.shape), 0.1)
    return cross_entropy.value + z_loss.value + sum(
        stats.load_balancing_loss.value + stats.router_z_loss.value for stats in router_stats)


if __name__ == "__main__":
    print(json.dumps({case: measure(*case.split(":")) for case in sys.argv[1:]}))
