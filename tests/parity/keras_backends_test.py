"""Layers and models are plain Keras: the JAX back end computes what the TensorFlow back end does, gradients too."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from switch_tf import policies

SCRIPT = """
import json, sys
import keras
import numpy as np
import switch_tf
from switch_tf import losses, partitioning

def loss_of(forward, features):
    logits, stats = forward()
    targets = features["decoder_input_tokens"]
    cross_entropy, z_loss, _ = losses.cross_entropy(logits, targets, np.ones(targets.shape), 0.1)
    return cross_entropy.value + z_loss.value + sum(
        one.load_balancing_loss.value + one.router_z_loss.value for one in stats)

def run(policy, dispatch):
    config = switch_tf.SwitchConfig(
        vocab_size=32, d_model=8, d_ff=16, d_kv=4, num_heads=2, num_encoder_layers=1, num_decoder_layers=1,
        num_experts=3, encoder_sparse_step=1, decoder_sparse_step=1, num_groups_multiple=2, min_expert_capacity=1,
        dropout_rate=0.1, expert_dropout_rate=0.1, routing_policy=policy, allow_non_causal_decoder=True,
        num_selected_experts=3 if policy == "top_n" else None, dispatch=dispatch)
    model = switch_tf.SwitchTransformer(config)
    model.build()
    random = np.random.RandomState(0)
    for variable in model.variables:
        variable.assign(random.normal(size=variable.shape) * 0.5)
    features = {"encoder_input_tokens": random.randint(1, 32, (4, 6)).astype("int32"),
                "decoder_input_tokens": random.randint(1, 32, (4, 4)).astype("int32")}
    features["encoder_input_tokens"][1, 3:] = 0
    if keras.backend.backend() == "jax":
        import jax
        rest = [variable.value for variable in model.non_trainable_variables]
        def loss(values):
            with partitioning.random_seed(7):
                return loss_of(lambda: model.stateless_call(values, rest, features, training=True,
                                                            return_router_stats=True)[0], features)
        value, gradients = jax.jit(jax.value_and_grad(loss))([variable.value for variable in model.trainable_variables])
    else:
        import tensorflow as tf
        with partitioning.random_seed(7), tf.GradientTape() as tape:
            value = loss_of(lambda: model.forward(features, training=True), features)
        gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
    logits = model.forward(features)[0]
    return {"loss": float(value), "logits": np.asarray(logits).tolist(),
            "gradients": [np.asarray(gradient).ravel().tolist() for gradient in gradients]}

print(json.dumps({policy: run(policy, sys.argv[1]) for policy in sys.argv[2:]}))
"""


def _run(backend, dispatch, names):
    environ = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, dispatch, *names], env=environ, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# JAX compiles for ten seconds a policy.
QUICK = ("switch", "top2", "expert_choice")


@pytest.mark.parametrize("dispatch, names", [
    ("index", QUICK), ("einsum", ("switch",)),
    pytest.param("index", [name for name in policies.names() if name not in QUICK], marks=pytest.mark.slow),
    pytest.param("einsum", ("expert_choice",), marks=pytest.mark.slow)])
def test_jax_and_tensorflow_agree_under_every_policy_with_dropout_and_jitter(dispatch, names):
    ours, found = _run("tensorflow", "index", names), _run("jax", dispatch, names)
    for policy in names:
        mine, theirs = ours[policy], found[policy]
        np.testing.assert_allclose(theirs["logits"], mine["logits"], rtol=1e-4, atol=1e-5, err_msg=policy)
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5), policy
        for one, other in zip(mine["gradients"], theirs["gradients"], strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5 * max(1.0, np.max(np.abs(one))),
                                       err_msg=policy)
