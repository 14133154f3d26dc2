"""Held-out loss, and the loss of a unigram model on the same targets as a baseline."""

from collections.abc import Callable, Iterable

import keras
import numpy as np

from switch_tf import metrics, partitioning
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.partitioning.partitioner import Partitioner


def compile_evaluation(model: keras.Model, settings: StepSettings, partitioner: Partitioner | None = None,
                       objective: Objective | None = None) -> Callable:
    """Traces one evaluation step, without dropout or jitter. Arguments as for `train_step.compile_steps`.

    Returns:
        A function that takes a dict of <int32>[batch, length] and returns Measurements.
    """
    partitioner, objective = partitioner or Partitioner(), objective or Objective()

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            measured = objective.measure(model.config, features, *model.forward(features, training=False), settings)
        return partitioner.sum_over_parts(measured)

    step = partitioner.compile(partitioner.results(call), settings.use_xla)
    return lambda features: step(partitioner.place({name: value[None] for name, value in features.items()}))


def evaluate(step: Callable, batches: Iterable[dict]) -> metrics.Measurements | None:
    """Merges an evaluation step's measurements over batches, in float64. Returns None if there is no batch."""
    sums = None
    for features in batches:
        sums = metrics.merge(sums, metrics.to_host(step(features)))
    return sums


def unigram_losses(config: SwitchConfig, training_batches: Iterable[dict],
                   held_out: dict[str, Iterable[dict]]) -> dict[str, float]:
    """Returns the loss of a model that knows only the frequency of each token in training targets.

    Args:
        config: SwitchConfig.
        training_batches: batches with the targets to count. Every token of the vocabulary counts once more.
        held_out: name -> batches with the targets to compute the loss on.

    Returns:
        Name -> float, in nats per token.
    """
    counts = 1 + _count_targets(config, training_batches)
    log_probs = np.log(counts / counts.sum())
    held_out_counts = {name: _count_targets(config, batches) for name, batches in held_out.items()}
    return {name: float(-np.sum(counted * log_probs) / counted.sum()) for name, counted in held_out_counts.items()}


def _count_targets(config, batches):
    """Returns the number of times each token is a target: <float64>[vocab]."""
    counts = np.zeros(config.vocab_size)
    for features in batches:
        targets, weights = (features[name].numpy().ravel() for name in target_features(config))
        counts += np.bincount(targets, weights=weights, minlength=config.vocab_size)[:config.vocab_size]
    return counts
