"""What training minimises: from a batch's features, logits and router statistics to the terms of a loss, and their sum.

The routers' losses belong to the model; the terms over targets are this objective's. Another one (distillation: the
teacher's logits beside the targets) measures other terms, and the step, the logs and the sum stay as they are.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from switch_tf import losses
from switch_tf.layers import masks
from switch_tf.metrics import Mean, Measurements


class LossWeights(NamedTuple):
    """What each part of the loss is divided by: numbers of tokens of the whole batch, known before the forward pass.

    `targets`: tokens with a loss weight; `load_balancing_loss`, `router_z_loss`: stack ("encoder", "decoder") -> tokens
    that its routers' losses count; `tokens`: real ones, inputs and targets, which nothing is divided by.
    """

    targets: Any
    load_balancing_loss: dict[str, Any]
    router_z_loss: dict[str, Any]
    tokens: Any


def target_features(config) -> tuple[str, str]:
    """Names of the features with targets and their loss weights: the decoder's, or the encoder's where it is alone."""
    stack = "encoder" if config.is_encoder_only else "decoder"
    return f"{stack}_target_tokens", f"{stack}_loss_weights"


def loss_weights(config, features, dtype="float32") -> LossWeights:
    """Counts the tokens of a batch, dict of <int32>[batch, length], in a float dtype."""
    real = {"encoder": masks.encoder_is_real(features)}
    if not config.is_encoder_only:
        real["decoder"] = masks.decoder_is_real(features)
    num_real = {stack: _sum(is_real, dtype) for stack, is_real in real.items()}
    num_all = {stack: tf.cast(tf.size(is_real), dtype) for stack, is_real in real.items()}
    return LossWeights(
        targets=_sum(features[target_features(config)[1]], dtype),
        load_balancing_loss=num_all if config.rules.balance_counts_padding else num_real,
        router_z_loss=num_all if config.rules.routes_padding else num_real,
        tokens=tf.add_n(list(num_real.values())))


def _sum(entries, dtype):
    return tf.reduce_sum(tf.cast(entries, dtype))


def measure(config, features, logits, router_stats, settings) -> Measurements:
    """Everything that is measured on a batch, or on a part of one, after its forward pass.

    Args:
        config: SwitchConfig.
        features: dict of <int32>[batch, length].
        logits: <float32>[batch, length, vocab].
        router_stats: tuple of RouterStats, of each sparse layer.
        settings: StepSettings.
    """
    target_name, weight_name = target_features(config)
    cross_entropy, z_loss, accuracy = losses.cross_entropy(
        logits, features[target_name], features[weight_name], settings.z_loss_weight, settings.label_smoothing)
    return Measurements({"cross_entropy": cross_entropy, "z_loss": z_loss}, accuracy,
                        dict(zip(config.sparse_layer_names, router_stats, strict=True)))


def weighed(measured: Measurements, weights: LossWeights) -> Measurements:
    """The measurements of a part of a batch with the whole batch's weights, so that the losses of its parts add up."""

    def by_stack(layer, stats):
        stack = layer.partition("/")[0]
        return stats._replace(
            load_balancing_loss=Mean(stats.load_balancing_loss.total, weights.load_balancing_loss[stack]),
            router_z_loss=Mean(stats.router_z_loss.total, weights.router_z_loss[stack]))

    return measured._replace(
        loss_terms={name: Mean(term.total, weights.targets) for name, term in measured.loss_terms.items()},
        routers={layer: by_stack(layer, stats) for layer, stats in measured.routers.items()})


def total_loss(config, measured: Measurements):
    """The loss: the objective's terms, and both router losses times their coefficients, summed over sparse layers."""
    terms = [term.total / tf.maximum(term.weight, 1.0) for term in measured.loss_terms.values()]
    for stats in measured.routers.values():
        for mean, coefficient in ((stats.load_balancing_loss, config.load_balancing_loss_weight),
                                  (stats.router_z_loss, config.router_z_loss_weight)):
            terms.append(coefficient * mean.total / tf.maximum(mean.weight, 1.0))
    return tf.add_n(terms)
