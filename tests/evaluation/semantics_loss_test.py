"""The loss that the trainer minimises is the loss that the model itself adds, whatever the semantics."""

import dataclasses

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer, losses
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.ops import random

ROUTERS = {
    "switch": {},
    "top2, with second places": {"routing_policy": "top2", "second_expert_policy": "all",
                                 "second_place_loss_weight": 0.5},
    "expert_choice": {"routing_policy": "expert_choice"},
}


@pytest.mark.parametrize("semantics, name", [
    *((semantics, name) for semantics in ("switch_tf", "mtf", "t5x", "hf") for name in list(ROUTERS)[:2]),
    ("mtf", "expert_choice")])
def test_the_trainers_loss_is_cross_entropy_and_what_the_model_adds(tiny_config, shallow_config, batch, semantics,
                                                                    name):
    is_hf = semantics == "hf"  # which omits the losses of a stack of sparse layers alone
    config = dataclasses.replace(
        tiny_config if is_hf else shallow_config, semantics=semantics, expert_capacity=3 if is_hf else None,
        dropout_rate=0.0, expert_dropout_rate=0.0, jitter_noise=0.0, load_balancing_loss_weight=0.5,
        router_z_loss_weight=0.1, allow_non_causal_decoder=True, **ROUTERS[name])
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config)
    model.build()
    settings = StepSettings(z_loss_weight=0.01)
    with random.random_seed(0):
        logits, router_stats = model.forward(batch, training=True)
    objective = Objective()
    measured = objective.measure(config, batch, logits, router_stats, settings)
    total = objective.total(config, objective.weights(config, batch).apply_to(measured))
    # Mesh TensorFlow divides by all targets.
    share = np.mean(batch["decoder_loss_weights"]) if semantics == "mtf" else 1.0
    assert share < 0.9 or semantics != "mtf"

    with random.random_seed(0):
        logits = model(batch, training=True)
    cross_entropy, z_loss, _ = losses.cross_entropy(
        logits, batch["decoder_target_tokens"], batch["decoder_loss_weights"], settings.z_loss_weight)
    added = sum(float(loss) for loss in model.losses)
    assert len(model.losses) == 2 and added > 0.1
    np.testing.assert_allclose(total, share * float(cross_entropy.value + z_loss.value) + added, rtol=1e-6)
