import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, data
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation import split_evaluator

DESCRIPTION = data.DatasetDescription("any", {"inputs": 8, "targets": 8}, 8, "validation")


def _targets(tokens):
    tokens = tf.constant(tokens, tf.int32)
    return {"decoder_target_tokens": tokens, "decoder_loss_weights": tf.cast(tokens > 0, tf.int32)}


def test_unigram_loss_by_hand(tiny_config):
    config = dataclasses.replace(tiny_config, vocab_size=4)
    train = [_targets([[1, 1, 2, 0]]), _targets([[1, 0, 0, 0]])]
    # counts with one more each: token 0 -> 1, 1 -> 4, 2 -> 2, 3 -> 1, of 8
    held_out = [_targets([[1, 2, 3, 0]])]
    expected = -(math.log(4 / 8) + math.log(2 / 8) + math.log(1 / 8)) / 3
    assert split_evaluator.unigram_losses(config, DESCRIPTION, train, {"task": held_out}) == {
        "task": pytest.approx(expected)}


def test_evaluation_weighs_batches_by_their_targets_and_ignores_rows_of_padding(shallow_config, batch):
    model = SwitchTransformer(dataclasses.replace(shallow_config, num_experts=0))
    model.build()
    step = split_evaluator.compile_evaluation(model, StepSettings())
    whole = split_evaluator.evaluate(step, [batch], DESCRIPTION)
    padded = {name: tf.concat([value[:3], tf.zeros_like(value[:5])], 0) for name, value in batch.items()}
    rest = {name: tf.concat([value[3:], tf.zeros_like(value[:3])], 0) for name, value in batch.items()}
    pieces = split_evaluator.evaluate(step, [padded, rest], DESCRIPTION)
    for one, other in ((pieces.loss_terms["cross_entropy"], whole.loss_terms["cross_entropy"]),
                       (pieces.accuracy, whole.accuracy)):
        np.testing.assert_allclose(one.total, other.total, rtol=1e-5)
        assert one.weight == other.weight


def test_evaluation_is_deterministic(shallow_config, batch):
    model = SwitchTransformer(shallow_config)
    model.build()
    step = split_evaluator.compile_evaluation(model, StepSettings())
    first, second = (split_evaluator.evaluate(step, [batch], DESCRIPTION).loss_terms["cross_entropy"].total
                     for _ in range(2))
    assert first == second
