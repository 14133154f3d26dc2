import dataclasses

import pytest
import tensorflow as tf

from switch_tf.evaluation.objectives import LossWeights, Objective
from switch_tf.metrics import Mean, Measurements, RouterStats


def _stats(total):
    nothing = Mean(tf.constant(0.0), tf.constant(0.0))
    return RouterStats(*[nothing] * 5, load_balancing_loss=Mean(tf.constant(total), tf.constant(1.0)),
                       router_z_loss=Mean(tf.constant(2 * total), tf.constant(1.0)))


def test_the_total_loss_of_a_part_of_a_batch_by_hand(tiny_config):
    config = dataclasses.replace(tiny_config, load_balancing_loss_weight=0.5, router_z_loss_weight=0.25)
    terms = {"cross_entropy": Mean(tf.constant(8.0), 2.0), "z_loss": Mean(tf.constant(2.0), 2.0)}
    part = Measurements(terms, Mean(1.0, 2.0), {"encoder/layers_1": _stats(30.0), "decoder/layers_1": _stats(12.0)})
    weights = LossWeights(targets=4.0, load_balancing_loss={"encoder": 10.0, "decoder": 6.0},
                                    router_z_loss={"encoder": 10.0, "decoder": 8.0}, tokens=16.0)
    # (8 + 2) / 4 + 0.5 * (30 / 10 + 12 / 6) + 0.25 * (60 / 10 + 24 / 8)
    total = Objective().total(config, weights.apply_to(part))
    assert float(total) == pytest.approx(2.5 + 2.5 + 2.25)
    # by themselves: (8 + 2) / 2 + 0.5 * (30 + 12) + 0.25 * (60 + 24)
    assert float(Objective().total(config, part)) == pytest.approx(5 + 21 + 21)


def test_of_nothing_the_loss_is_0(tiny_config):
    nothing = Mean(tf.constant(0.0), tf.constant(0.0))
    measured = Measurements({"cross_entropy": nothing}, nothing, {"encoder/layers_1": RouterStats(*[nothing] * 7)})
    assert float(Objective().total(tiny_config, measured)) == 0.0


def test_loss_weights_count_real_tokens_of_the_batch(tiny_config, batch):
    weights = tf.nest.map_structure(float, Objective().weights(tiny_config, batch))
    num_inputs = 8 * 12 - 3 * 5  # 3 examples lack 5 tokens
    num_targets = 8 * 6 - 4 * 2  # 4 examples lack 2
    by_stack = {"encoder": num_inputs, "decoder": num_targets}
    assert weights == LossWeights(num_targets, by_stack, by_stack, num_inputs + num_targets)


@pytest.mark.parametrize("semantics, counts_padding", [
    ("switch_tf", (False, False)), ("mtf", (True, False)), ("t5x", (True, True)), ("hf", (True, True))])
def test_foreign_semantics_count_padding(tiny_config, batch, semantics, counts_padding):
    config = dataclasses.replace(tiny_config, semantics=semantics, expert_capacity=3 if semantics == "hf" else None)
    weights = Objective().weights(config, batch)
    found = tuple(float(by_stack["encoder"]) == 8 * 12 for by_stack in (
        weights.load_balancing_loss, weights.router_z_loss))
    assert found == counts_padding
