"""The objective: the terms of the training loss, their coefficients, and their sum.

To use another objective, write a subclass of `Objective`, as `surgery/distillation.py` does, and bind it in a gin file:
`trainer.Trainer.objective = @my_module.MyObjective()`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from switch_tf import losses
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.data.batches import AddedFeatures
from switch_tf.layers import masks
from switch_tf.metrics import Mean, Measurements, RouterStats
from switch_tf.partitioning.partitioner import Partitioner


class LossWeights(NamedTuple):
    """Divisors of the loss: token counts of the whole batch, known before the forward pass. <float> scalars.

    `targets`: Tokens with a loss weight, or all with `Rules.averages_over_padding`.
    `load_balancing_loss`, `router_z_loss`: Stack ("encoder", "decoder") -> tokens in its router losses.
    `tokens`: Real tokens, inputs and targets. Divides no term.
    """

    targets: Any
    load_balancing_loss: dict
    router_z_loss: dict
    tokens: Any

    def apply_to(self, measured: Measurements) -> Measurements:
        """Returns a part's measurements with these weights, so that the parts' losses add up."""
        routers = {}
        for layer, stats in measured.routers.items():
            stack = layer.partition("/")[0]
            routers[layer] = stats._replace(
                load_balancing_loss=Mean(stats.load_balancing_loss.total, self.load_balancing_loss[stack]),
                router_z_loss=Mean(stats.router_z_loss.total, self.router_z_loss[stack]))
        return measured._replace(routers=routers, loss_terms={
            name: Mean(term.total, self.targets) for name, term in measured.loss_terms.items()})


class Objective:
    """Cross-entropy of the targets with its z-loss, plus the router losses of the model.

    A subclass adds or replaces terms in `measure`, but keeps "cross_entropy": evaluations report it as the loss.
    `coefficients` weighs terms in the total, 1 by default. To run a second model, create it in `build`, load its
    weights in `restore` and list them in `variables`.
    """

    coefficients: Mapping[str, float] = {}

    def check(self, config: SwitchConfig, configuration: dict) -> None:
        """Refuses an unsuitable run before anything is built.

        Args:
            configuration: `continuation.record` of the run.
        """

    def build(self, partitioner: Partitioner) -> None:
        """Creates further variables for `measure`, here none."""

    def restore(self) -> None:
        """Loads their values. Not called if only shapes matter."""

    @property
    def variables(self) -> list:
        """Keras variables from `build`."""
        return []

    def added_features(self) -> AddedFeatures | None:
        """Returns features that join each training batch for `measure`, here None."""
        return None

    def get_config(self) -> dict:
        """Returns the arguments, JSON-able, for checkpoints."""
        return {}

    def for_evaluation(self) -> "Objective":
        """Returns itself, or an objective without additional variables."""
        return self

    def weights(self, config: SwitchConfig, features: dict, dtype: str = "float32") -> LossWeights:
        """Counts the tokens of a batch, dict of <int32>[batch, length], in a float dtype."""
        is_real = {"encoder": masks.encoder_is_real(features)}
        if not config.is_encoder_only:
            is_real["decoder"] = masks.decoder_is_real(features, config.rules)
        num_real = {stack: _sum(mask, dtype) for stack, mask in is_real.items()}
        num_all = {stack: tf.cast(tf.size(mask), dtype) for stack, mask in is_real.items()}
        targets = features[target_features(config)[1]]
        return LossWeights(
            targets=tf.cast(tf.size(targets), dtype) if config.rules.averages_over_padding else _sum(targets, dtype),
            load_balancing_loss=num_all if config.rules.balance_counts_padding else num_real,
            router_z_loss=num_all if config.rules.routes_padding else num_real,
            tokens=tf.add_n(list(num_real.values())))

    def measure(self, config: SwitchConfig, features: dict, logits: Any,
                router_stats: tuple[RouterStats, ...], settings: StepSettings) -> Measurements:
        """Measures a batch, or a part of it, after its forward pass.

        Args:
            features: dict of <int32>[batch, length].
            logits: <float32>[batch, length, vocab].
            router_stats: RouterStats of each sparse layer.

        Returns: Measurements. Each term is a Mean over targets, in nats.
        """
        target_name, weight_name = target_features(config)
        cross_entropy, z_loss, accuracy = losses.cross_entropy(
            logits, features[target_name], features[weight_name], settings.z_loss_weight, settings.label_smoothing)
        return Measurements({"cross_entropy": cross_entropy, "z_loss": z_loss}, accuracy,
                            dict(zip(config.sparse_layer_names, router_stats, strict=True)))

    def total(self, config: SwitchConfig, measured: Measurements) -> Any:
        """Returns the loss, <float> scalar: the weighted terms and all router losses."""
        terms = [_weighted(term, self.coefficients.get(name)) for name, term in measured.loss_terms.items()]
        for stats in measured.routers.values():
            terms.append(_weighted(stats.load_balancing_loss, config.load_balancing_loss_weight))
            terms.append(_weighted(stats.router_z_loss, config.router_z_loss_weight))
        return tf.add_n(terms)


def target_features(config: SwitchConfig) -> tuple[str, str]:
    """Returns the names of the target tokens and loss weights."""
    stack = "encoder" if config.is_encoder_only else "decoder"
    return f"{stack}_target_tokens", f"{stack}_loss_weights"


def _sum(entries, dtype):
    return tf.reduce_sum(tf.cast(entries, dtype))


def _weighted(mean, coefficient):
    total = mean.total if coefficient is None else coefficient * mean.total
    return total / tf.maximum(mean.weight, 1.0)
