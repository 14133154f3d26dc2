"""Held-out loss, and the loss of a unigram model on the same targets to compare it with."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from switch_tf import metrics, partitioning
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objective import measure, target_features
from switch_tf.partitioning.partitioner import Partitioner


class HeldOut(NamedTuple):
    """What is evaluated again and again: the name it goes by, and batches of features, <int32>[batch, length] each."""

    name: str
    batches: tf.data.Dataset


def compile_evaluation(model, settings: StepSettings, partitioner=None):
    """Traces one evaluation step, without dropout or jitter.

    Returns:
        A function of a dict of <int32>[batch, length] that returns Measurements.
    """
    partitioner = partitioner or Partitioner()

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            measured = measure(model.config, features, *model.forward(features, training=False), settings)
        return partitioner.sum_over_parts(measured)

    step = partitioner.compile(partitioner.results(call), settings.use_xla)
    return lambda features: step(partitioner.place({name: value[None] for name, value in features.items()}))


def evaluate(step, batches) -> metrics.Measurements:
    """Merges an evaluation step's measurements over batches, of which there is at least one, in float64."""
    sums = None
    for features in batches:
        sums = metrics.merge(sums, metrics.to_host(step(features)))
    return sums


def unigram_loss(config, training_batches, evaluation_batches) -> float:
    """Loss of a model that knows each token's frequency in training targets and nothing else, in nats per token.

    Args:
        config: SwitchConfig.
        training_batches: features whose targets are counted; every token of the vocabulary is counted once more.
        evaluation_batches: features on whose targets the loss is taken.
    """
    counts = np.ones(config.vocab_size)
    for features in training_batches:
        counts += _target_counts(config, features)
    held_out = np.zeros(config.vocab_size)
    for features in evaluation_batches:
        held_out += _target_counts(config, features)
    return float(-np.sum(held_out * np.log(counts / counts.sum())) / held_out.sum())


def _target_counts(config, features):
    targets, weights = (features[name].numpy().ravel() for name in target_features(config))
    return np.bincount(targets, weights=weights, minlength=config.vocab_size)[:config.vocab_size]
