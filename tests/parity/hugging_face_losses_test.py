"""Router losses under semantics "hf" are those of transformers 5.23, written here once more in numpy.

There each stack's router logits, <float32>[batch, length, expert] of every sparse layer, are joined along the length
before one load-balancing loss and one z-loss are taken; a stack with a sparse step of 1 has neither. The weights and
inputs are those of transformers' own golden checkpoints, with padding, which counts like any token.
"""

import functools
import pathlib
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import conversion, losses
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.layers import Router

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"


@functools.cache
def run(case):
    """The model, its features, its statistics, and what its routers see and say in float64: (inputs, logits), by stack.

    Its logits, too, which the loss of targets is made of.
    """
    expected = np.load(GOLDEN / case / "expected.npz")
    model = conversion.from_hugging_face(GOLDEN / case)
    features = {"encoder_input_tokens": expected["inputs"], "decoder_input_tokens": expected["decoder_inputs"],
                "decoder_target_tokens": expected["targets"], "decoder_loss_weights": expected["targets"] != 0}
    recorded = []

    def record(router, inputs, training):
        recorded.append((inputs.numpy(), original(router, inputs, training)))
        return recorded[-1][1]

    original = Router._logits
    with mock.patch.object(Router, "_logits", record):
        logits, router_stats = model.forward(features)
    num_encoder = len(model.config.encoder_sparse_layers)
    layers = [(inputs, scores.numpy().astype(np.float64)) for inputs, scores in recorded]
    return model, features, logits, router_stats, {"encoder": layers[:num_encoder], "decoder": layers[num_encoder:]}


def theirs(layers, sparse_step):
    """transformers' load-balancing loss and z-loss of a stack."""
    if sparse_step <= 1:
        return 0.0, 0.0
    logits = np.concatenate([logits for _, logits in layers], axis=1)
    normalizer = np.log(np.exp(logits).sum(-1, keepdims=True))
    num_experts = logits.shape[-1]
    chosen = np.eye(num_experts)[logits.argmax(-1)]
    balance = (chosen.mean(1) * np.exp(logits - normalizer).mean(1)).mean() * num_experts**2
    return balance, (normalizer**2).mean()


def expected_losses(case):
    model, *_, layers = run(case)
    return {"encoder": theirs(layers["encoder"], model.config.encoder_sparse_step),
            "decoder": theirs(layers["decoder"], model.config.decoder_sparse_step)}


@pytest.mark.parametrize("case", ["switch", "switch_step_1", "switch_step_4"])
def test_the_losses_of_a_stacks_routers_add_up_to_theirs(case):
    model, _, _, router_stats, layers = run(case)
    by_name = dict(zip(model.config.sparse_layer_names, router_stats, strict=True))
    for stack, (balance, z_loss) in expected_losses(case).items():
        found = [stats for name, stats in by_name.items() if name.startswith(stack)]
        assert len(found) == len(layers[stack]) > 0
        assert sum(float(stats.load_balancing_loss.value) for stats in found) == pytest.approx(balance, rel=1e-5)
        assert sum(float(stats.router_z_loss.value) for stats in found) == pytest.approx(z_loss, rel=1e-5)
        by_layer = sum(theirs([layer], sparse_step=2)[0] for layer in layers[stack])
        print(f"{case}, {stack}: balance {balance:.4f}, z {z_loss:.3f}; a sum over layers would be {by_layer:.3f}")


def test_joining_matters_here():
    # A layer's imbalance is made good by another's, which a sum over layers would not see.
    balance, _ = expected_losses("switch")["encoder"]
    by_layer = [theirs([layer], sparse_step=2)[0] for layer in run("switch")[-1]["encoder"]]
    assert balance < min(by_layer)


def test_fully_sparse_stacks_add_nothing():
    model, features, *_ = run("switch_step_1")
    assert model.config.encoder_sparse_layers == model.config.decoder_sparse_layers == (0, 1)
    model(features)
    assert len(model.losses) == 4 and float(sum(model.losses)) == 0


def test_the_gradient_is_that_of_the_joined_loss():
    # d balance / d P[layer, token, e] is the same for all layers and tokens of a sequence: f_e of all of them.
    model, features, *_, layers = run("switch")
    kernels = [layer.mlp.router.kernel.value for layer in model.encoder.layers if layer.has_feed_forward_experts]
    with tf.GradientTape() as tape:
        _, router_stats = model.forward(features)
        total = tf.add_n([stats.load_balancing_loss.value for stats in router_stats[:len(kernels)]])
    gradients = tape.gradient(total, kernels)
    inputs, last = layers["encoder"][-1]
    fraction = np.mean([np.eye(last.shape[-1])[each.argmax(-1)].mean(1) for _, each in layers["encoder"]], axis=0)
    probs = np.exp(last) / np.exp(last).sum(-1, keepdims=True)
    of_probs = np.broadcast_to(fraction[:, None], probs.shape) * last.shape[-1] / (2 * np.prod(last.shape[:2]))
    of_logits = probs * (of_probs - (of_probs * probs).sum(-1, keepdims=True))
    expected = np.einsum("gsm,gse->me", inputs, of_logits)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(gradients[-1], expected, atol=1e-6)


def test_the_model_adds_and_the_trainer_minimises_them():
    model, features, logits, router_stats, _ = run("switch")
    (encoder_balance, encoder_z), (decoder_balance, decoder_z) = expected_losses("switch").values()
    added = (model.config.load_balancing_loss_weight * (encoder_balance + decoder_balance)
             + model.config.router_z_loss_weight * (encoder_z + decoder_z))
    model(features)
    assert float(sum(model.losses)) == pytest.approx(added, rel=1e-5)
    features = {name: tf.constant(value) for name, value in features.items()}
    objective = Objective()
    measured = objective.measure(model.config, features, logits, router_stats, StepSettings(z_loss_weight=0.0))
    total = objective.total(model.config, objective.weights(model.config, features).apply_to(measured))
    cross_entropy = losses.cross_entropy(logits, features["decoder_target_tokens"], features["decoder_loss_weights"])[0]
    assert float(total) == pytest.approx(float(cross_entropy.value) + added, rel=1e-5)
