"""Held-out loss, and the loss of a unigram model on the same targets to compare it with."""

import numpy as np

from switch_tf import metrics, partitioning
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.run import StepSettings
from switch_tf.training.train_step import batch_metrics, target_features


def compile_evaluation(model, settings: StepSettings, partitioner=None):
    """Traces one evaluation step, without dropout or jitter.

    Returns:
        A function of a dict of <int32>[batch, length] that returns a dict of name -> Mean.
    """
    partitioner = partitioner or Partitioner()

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            logits, router_stats = model.forward(features, training=False)
            measured = batch_metrics(model.config, features, logits, router_stats, settings)
        return partitioner.sum_over_parts(measured)

    step = partitioner.compile(partitioner.results(call), settings.use_xla)
    return lambda features: step(partitioner.place({name: value[None] for name, value in features.items()}))


def evaluate(step, batches) -> dict[str, metrics.Mean]:
    """Merges an evaluation step's metrics over batches, as Means of float64 numbers."""
    sums: dict[str, metrics.Mean] = {}
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
